package sandboxes

// maxPlaces bounds the sandboxes that requests have wake at one time. Calls are not bounded by it.
const maxPlaces = 200

// places counts the sandboxes that requests have wake. A sandbox has a place from the request until it runs or ends.
//
// A team may take a place only while it has fewer than are free. So one team has half of the places at most, two have
// three quarters, and each further team finds half of the rest. No team needs to be known for that, and none has a setting.
// Sandboxes without a team count as one team.
type places struct {
	taken  int
	byTeam map[string]int
}

// take takes a place for a team, and reports whether there was one.
func (p *places) take(team string) bool {
	if p.byTeam[team] >= maxPlaces-p.taken {
		return false
	}
	p.taken++
	p.byTeam[team]++
	return true
}

func (p *places) giveBack(team string) {
	p.taken--
	if p.byTeam[team]--; p.byTeam[team] == 0 {
		delete(p.byTeam, team)
	}
}
