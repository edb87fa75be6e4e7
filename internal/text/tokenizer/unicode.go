package tokenizer

import (
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// unicodeText lists the classes of runes of the Python library, which mixes several Unicode versions. Those in Go's
// package unicode depend on the version of Go.
//
//go:embed unicode.txt
var unicodeText string

type tables struct {
	sets  map[string]set
	lower map[rune]string
}

var unicodeTables = sync.OnceValue(func() *tables {
	t := &tables{sets: map[string]set{}, lower: map[rune]string{}}
	for line := range strings.Lines(unicodeText) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch name {
		case "#":
		case "lower":
			t.readLower(rest)
		default:
			t.sets[name] = readSet(rest)
		}
	}
	t.derive()
	return t
})

// derive computes the sets that combine others.
func (t *tables) derive() {
	var all []set
	groups := "L Lu Ll Lt Lm Lo|M Mn Mc Me|N Nd Nl No|P Pc Pd Ps Pe Pi Pf Po|S Sm Sc Sk So|Z Zs Zl Zp"
	for group := range strings.SplitSeq(groups, "|") {
		names := strings.Fields(group)
		var parts []set
		for _, n := range names[1:] {
			parts = append(parts, t.sets[n])
		}
		t.sets[names[0]] = union(parts...)
		all = append(all, t.sets[names[0]])
	}
	surrogates := set{{0xd800, 0xdfff}}
	t.sets["Cs"] = surrogates
	t.sets["Cn"] = union(append(all, t.sets["Cc"], t.sets["Cf"], t.sets["Co"], surrogates)...).not()
	t.sets["C"] = union(t.sets["Cc"], t.sets["Cf"], t.sets["Co"], t.sets["Cn"], surrogates)
	t.sets["space"] = union(set{{9, 13}, {0x85, 0x85}}, t.sets["Z"])
}

func readSet(text string) set {
	var s set
	for field := range strings.FieldsSeq(text) {
		lo, hi, is := strings.Cut(field, "-")
		if !is {
			hi = lo
		}
		s = append(s, span{hexRune(lo), hexRune(hi)})
	}
	return s
}

// readLower reads "41:61 130:69,307".
func (t *tables) readLower(text string) {
	for field := range strings.FieldsSeq(text) {
		from, to, _ := strings.Cut(field, ":")
		var s []rune
		for r := range strings.SplitSeq(to, ",") {
			s = append(s, hexRune(r))
		}
		t.lower[hexRune(from)] = string(s)
	}
}

func hexRune(s string) rune {
	v, err := strconv.ParseUint(s, 16, 21)
	if err != nil {
		panic("tokenizer: unicode.txt: " + err.Error())
	}
	return rune(v)
}

// property returns the set of \p{name}.
func property(name string) (set, error) {
	t := unicodeTables()
	key := strings.NewReplacer(" ", "", "_", "", "-", "").Replace(name)
	if long, ok := longNames[strings.ToLower(key)]; ok {
		key = long
	}
	for _, n := range []string{key, capital(key)} {
		if s, ok := t.sets[n]; ok && !slices.Contains(notProperties, n) {
			return s, nil
		}
	}
	return nil, fmt.Errorf(`the class \p{%.40s} is not known here`, name)
}

// notProperties lists the sets of unicode.txt that no pattern may name.
var notProperties = []string{"rust_word", "rust_numeric", "punctuation", "mark", "bert_control", "bert_accent",
	"active"}

// longNames lists other names of properties, in lower case.
var longNames = map[string]string{
	"letter": "L", "uppercaseletter": "Lu", "lowercaseletter": "Ll", "titlecaseletter": "Lt", "modifierletter": "Lm",
	"otherletter": "Lo", "mark": "M", "number": "N", "decimalnumber": "Nd", "digit": "Nd", "punctuation": "P",
	"symbol": "S", "separator": "Z", "other": "C", "control": "Cc", "space": "space", "whitespace": "space",
	"word": "word",
}

// capital writes HAN and han as Han.
func capital(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + strings.ToLower(s[1:])
}

// newClassOnce returns a class of unicode.txt, made on first use.
func newClassOnce(name string) func() *class {
	return sync.OnceValue(func() *class { return newClass(unicodeTables().sets[name]) })
}
