package policy

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func dest(t testing.TB, authority string) Dest {
	t.Helper()
	d, err := Destination(authority, 443)
	require.NoError(t, err)
	return d
}

func TestDecideNamesTheFirstThatRefuses(t *testing.T) {
	only := mustRules(t, []string{"a.example", "*.b.example", "8.8.8.0/24"}, denyAll)
	some := mustRules(t, nil, []string{"8.8.8.8", "1.1.1.0/24"})
	for _, c := range []struct {
		p         Policy
		authority string
		verdict   Verdict
		reason    Reason
	}{
		{Policy{}, "a.example:443", Allowed, ""},
		{Policy{}, "a.example:80", Allowed, ""},
		{Policy{}, "a.example:22", Refused, ClosedPort},
		{Policy{Ports: []uint16{22}}, "a.example:22", Allowed, ""},
		{Policy{Ports: []uint16{22}}, "a.example:443", Refused, ClosedPort},
		{Policy{}, "8.8.8.8", Allowed, ""},
		{Policy{}, "10.0.0.1", Refused, NotOutside},
		{Policy{}, "[::1]", Refused, NotOutside},
		{Policy{Pool: only}, "c.example", Refused, PoolRules},
		{Policy{Claim: only}, "c.example", Refused, ClaimRules},
		{Policy{Pool: only}, "a.example", Allowed, ""},
		{Policy{Pool: only, Claim: some}, "a.example", ByAddress, ""},
		{Policy{Pool: some, Claim: only}, "x.b.example", ByAddress, ""},
		{Policy{Pool: some, Claim: only}, "b.example", Refused, ClaimRules},
		{Policy{Pool: some, Claim: some}, "b.example", ByAddress, ""},
		{Policy{Pool: some, Claim: only}, "8.8.8.8", Refused, PoolRules},
		{Policy{Pool: only, Claim: some}, "8.8.8.8", Refused, ClaimRules},
		{Policy{Pool: only, Claim: some}, "8.8.8.9", Allowed, ""},
		{Policy{Pool: only, Claim: some}, "9.9.9.9", Refused, PoolRules},
	} {
		verdict, reason := c.p.Decide(dest(t, c.authority))
		require.Equal(t, c.verdict, verdict, c.authority)
		require.Equal(t, c.reason, reason, c.authority)
	}
	verdict, _ := Policy{Ports: []uint16{0}}.Decide(Dest{})
	require.Equal(t, Refused, verdict)
	require.False(t, Policy{Ports: []uint16{0}}.Permits(Dest{}, netip.MustParseAddr("8.8.8.8")))
}

func TestEachAddressOfAnAllowedNameIsChecked(t *testing.T) {
	only := mustRules(t, []string{"a.example"}, []string{all, "8.8.8.0/24"})
	some := mustRules(t, nil, []string{"8.8.8.0/24"})
	a := dest(t, "a.example")
	for _, rebound := range addrs("10.0.0.1", "127.0.0.1", "169.254.169.254", "::1", "::ffff:8.8.4.4",
		"64:ff9b::808:404", "fe80::1%eth0") {
		require.False(t, Policy{}.Permits(a, rebound), rebound)
		require.False(t, Policy{Claim: only}.Permits(a, rebound), rebound)
	}
	eight := netip.MustParseAddr("8.8.8.8")
	require.True(t, Policy{Claim: only}.Permits(a, eight), "allow beats deny")
	require.False(t, Policy{Pool: some, Claim: only}.Permits(a, eight), "the pool's deny list counts")
	require.False(t, Policy{Pool: only, Claim: some}.Permits(a, eight))
	require.False(t, Policy{Claim: only}.Permits(dest(t, "b.example"), eight))
	require.False(t, Policy{}.Permits(dest(t, "a.example:22"), eight))
	require.True(t, Policy{}.Permits(dest(t, "8.8.8.8"), eight))
	require.False(t, Policy{}.Permits(dest(t, "8.8.4.4"), eight), "another address than that of the request")
}

func TestReachOfTheOperatorHoldsForAllRules(t *testing.T) {
	reach, err := NewReach(mustPrefixes("10.0.0.0/8"), mustPrefixes("10.96.0.0/12", "8.8.8.8/32"))
	require.NoError(t, err)
	p := Policy{Claim: mustRules(t, []string{"a.example", "10.0.0.0/8", "8.8.8.8"}, denyAll), Reach: reach}
	a := dest(t, "a.example")
	require.True(t, p.Permits(a, netip.MustParseAddr("10.1.1.1")))
	require.False(t, p.Permits(a, netip.MustParseAddr("10.96.0.1")))
	require.False(t, p.Permits(a, netip.MustParseAddr("8.8.8.8")))
	for authority, want := range map[string]Reason{
		"10.1.1.1": "", "10.96.0.1": NotOutside, "8.8.8.8": NotOutside, "9.9.9.9": ClaimRules,
	} {
		_, reason := p.Decide(dest(t, authority))
		require.Equal(t, want, reason, authority)
	}
}

// judge is the rules once more, read from their text entry by entry.
type judge struct{ allow, deny []string }

// entryHas reports whether an entry is a CIDR or an address that has the address.
func entryHas(entry string, a netip.Addr) bool {
	if entry == all {
		return true
	}
	if p, err := netip.ParsePrefix(entry); err == nil {
		return p.Contains(a)
	}
	one, err := netip.ParseAddr(entry)
	return err == nil && one == a
}

func (j judge) permits(host string, a netip.Addr) bool {
	for _, entry := range j.allow {
		switch {
		case entry == all:
			return true
		case host == "" || !slices.Contains(j.deny, all):
			if entryHas(entry, a) {
				return true
			}
		case entry == host, entry[0] == '*' && strings.HasSuffix(host, entry[1:]):
			return true
		}
	}
	return !slices.ContainsFunc(j.deny, func(entry string) bool { return entryHas(entry, a) })
}

func TestPolicyIsWhatANaiveJudgeSays(t *testing.T) {
	hosts := []string{"a.example", "b.a.example", "c.b.a.example", "b.example", "xa.example", "example.a"}
	names := []string{"a.example", "*.a.example", "*.b.a.example", "b.example", "*.example.a", "b.a.example"}
	cidrs := []string{"8.8.8.8", "8.8.8.0/24", "8.0.0.0/8", "9.9.0.0/16", "2606::/16", "2606::1", "::/0", "0.0.0.0/1"}
	addresses := addrs("8.8.8.8", "8.8.8.9", "8.9.9.9", "9.9.9.9", "1.1.1.1", "200.1.1.1", "2606::1", "2606::2", "2607::1")
	rules := func(t *rapid.T, label string) (*Rules, judge) {
		if rapid.IntRange(0, 9).Draw(t, label+" nil") == 0 {
			return nil, judge{}
		}
		list := func(of []string, name string) []string {
			return rapid.SliceOfN(rapid.SampledFrom(of), 0, 4).Draw(t, label+name)
		}
		j := judge{list(cidrs, " allow"), list(cidrs, " deny")}
		if rapid.Bool().Draw(t, label+" closed") {
			j.deny = append(j.deny, all)
			j.allow = append(list(names, " names"), j.allow...)
		}
		if rapid.IntRange(0, 9).Draw(t, label+" open") == 0 {
			j.allow = append(j.allow, all)
		}
		r, err := parse(j.allow, j.deny)
		require.NoError(t, err)
		return r, j
	}
	rapid.Check(t, func(t *rapid.T) {
		var p Policy
		var pool, claim judge
		p.Pool, pool = rules(t, "pool")
		p.Claim, claim = rules(t, "claim")
		for _, host := range hosts {
			d := Dest{Host: host, Port: 443}
			verdict, reason := p.Decide(d)
			require.Equal(t, verdict == Refused, reason != "")
			permitted := 0
			for _, a := range addresses {
				want := pool.permits(host, a) && claim.permits(host, a)
				require.Equal(t, want, p.Permits(d, a), "%v %v", d, a)
				if want {
					permitted++
				}
			}
			switch verdict {
			case Allowed:
				require.Equal(t, len(addresses), permitted, d)
			case Refused:
				require.Zero(t, permitted, d)
			case ByAddress:
			}
		}
		for _, a := range addresses {
			d := Dest{Addr: a, Port: 443}
			want := pool.permits("", a) && claim.permits("", a)
			verdict, _ := p.Decide(d)
			require.Equal(t, want, verdict == Allowed, d)
			require.NotEqual(t, ByAddress, verdict, d)
			require.Equal(t, want, p.Permits(d, a), d)
		}
	})
}

// entries returns allow lists as users have them: names, wildcards and CIDRs.
func entries(n, seed int) (allow []string) {
	for i := range n {
		switch i % 4 {
		case 0, 1:
			allow = append(allow, fmt.Sprintf("api-%d.service-%d.example.com", i, seed))
		case 2:
			allow = append(allow, fmt.Sprintf("*.zone-%d.service-%d.example.com", i, seed))
		case 3:
			allow = append(allow, fmt.Sprintf("%d.%d.0.0/%d", 20+i%100, seed%200, 16+i%8))
		}
	}
	return allow
}

func TestDecisionsAllocateNoMemoryAtAll(t *testing.T) {
	p := Policy{Pool: mustRules(t, nil, []string{"8.8.8.0/24"}), Claim: mustRules(t, entries(20, 1), denyAll)}
	name, refused, literal := dest(t, "a.zone-2.service-1.example.com"), dest(t, "a.b.c.d.example"), dest(t, "8.8.4.4")
	require.Zero(t, testing.AllocsPerRun(100, func() {
		p.Decide(name)
		p.Decide(refused)
		p.Decide(literal)
		p.Permits(name, literal.Addr)
	}))
}

func TestRulesOfManySandboxesTakeLittleMemory(t *testing.T) {
	const n, bound = 10_000, 16 << 10
	inUse := func() int64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	kept := make([]*Rules, n)
	before := inUse()
	for i := range kept {
		kept[i] = mustRules(t, entries(20, i), denyAll)
	}
	each := (inUse() - before) / n
	t.Logf("%d bytes for the rules of one sandbox with 20 entries", each)
	require.Less(t, each, int64(bound))
	runtime.KeepAlive(kept)
}

func BenchmarkDecide(b *testing.B) {
	for _, n := range []int{20, maxEntries} {
		p := Policy{Pool: mustRules(b, nil, []string{"8.8.8.0/24"}), Claim: mustRules(b, entries(n, 1), denyAll)}
		longest := strings.Repeat("a.", 120) + "example.com:443"
		for what, authority := range map[string]string{
			"exact": "api-0.service-1.example.com", "wildcard": "a.zone-2.service-1.example.com", "refused": "www.example.org",
			"labels": longest, "literal": "9.9.9.9",
		} {
			d := dest(b, authority)
			b.Run(fmt.Sprintf("%s/%d", what, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					p.Decide(d)
				}
			})
		}
	}
}

func BenchmarkDestination(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		_, _ = Destination("api-0.service-1.example.com:443", 0)
	}
}
