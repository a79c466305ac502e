package sandboxid

// Key is an ID as a comparable value of fixed size without a pointer. As a map key it takes as much room
// as the header of a string alone. The zero Key is that of no ID. Only KeyOf makes other ones.
type Key struct{ high, low uint64 }

const (
	// wordLen is how many characters a word of a Key has: the most of which 37^n fits into 64 bits.
	wordLen = 12
	// base has a digit for each character, and 0 for the end of the ID.
	base = 37
)

// digits are the digits of the characters of an ID, 0 for all other bytes.
var digits = func() (all [256]uint8) {
	for i := range len(alphabet) {
		all[alphabet[i]] = uint8(i + 1)
	}
	return all
}()

// KeyOf returns the key of an ID, and false if id is not valid or longer than MaxKeyLen. It does not
// allocate and does not keep id.
func KeyOf[T string | []byte](id T) (k Key, ok bool) {
	if len(id) == 0 || len(id) > MaxKeyLen || string(id) == Reserved {
		return Key{}, false
	}
	for i := range len(id) {
		digit := uint64(digits[id[i]])
		if digit == 0 {
			return Key{}, false
		}
		if i < wordLen {
			k.high = k.high*base + digit
		} else {
			k.low = k.low*base + digit
		}
	}
	return k, true
}

// MustKey is KeyOf for an ID that is known to be valid. It panics if it is not.
func MustKey(id string) Key {
	k, ok := KeyOf(id)
	if !ok {
		panic("not a sandbox ID: " + id)
	}
	return k
}

// String returns the ID.
func (k Key) String() string { return string(k.AppendTo(nil)) }

// AppendTo appends the ID.
func (k Key) AppendTo(b []byte) []byte {
	var id [MaxKeyLen]byte
	at := len(id)
	for _, word := range [...]uint64{k.low, k.high} {
		for ; word > 0; word /= base {
			at--
			id[at] = alphabet[word%base-1]
		}
	}
	return append(b, id[at:]...)
}
