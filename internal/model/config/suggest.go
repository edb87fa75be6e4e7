package config

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// distance returns the number of letters to insert, delete, replace or swap with their neighbour
// to make b of a (optimal string alignment).
func distance(a, b string) int {
	before, last, row := []int(nil), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(row[j-1]+1, last[j]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, make([]int, len(b)+1)
	}
	return last[len(b)]
}

// Nearest returns the choice closest to a word, or "" if none is close: a third of the letters may be wrong, or one of
// a
// short word, but not all; or the word may be a longer form of the choice (LlamaForCausalLM).
func Nearest(word string, choices []string) string {
	if word == "" || len(word) > 64 {
		return ""
	}
	fold := func(s string) string { return strings.ReplaceAll(strings.ToLower(s), "-", "_") }
	best, bestAt := "", len(word)
	for _, c := range choices {
		w, f := fold(word), fold(c)
		d := distance(w, f)
		if shorter := min(len(w), len(f)); d > max(1, shorter/3) || d >= shorter && d > 0 {
			if len(f) < 3 || !strings.HasPrefix(w, f) {
				continue
			}
			d = len(word) - 1
		}
		if best == "" || d < bestAt {
			best, bestAt = c, d
		}
	}
	return best
}

// unknownKey returns what to say of a key that the table does not have, and the keys that were
// probably meant.
func unknownKey(section, name string) (msg string, meant []string) {
	if keyAt[name] != nil && strings.Contains(name, ".") {
		return "unknown key; write it nested: " + strings.ReplaceAll(name, ".", ": {") + ": ...}", []string{name}
	}
	for path := join(section, name); path != ""; path, _ = split(path) {
		if instead, ok := unbuiltKeys[path]; ok {
			return "not in this build; " + cmp.Or(instead, "take it out"), nil
		}
	}
	said, ok := otherNames[join(section, name)]
	if !ok && len(keysNamed[name]) == 0 {
		said, ok = otherNames[name]
	}
	if ok {
		return "unknown key; " + said, mentioned(said)
	}
	if meant = guesses(section, name); len(meant) > 0 {
		return "unknown key; did you mean " + strings.Join(meant, " or ") + "?", meant
	}
	if children := childrenOf[section]; section != "" && len(children) > 0 {
		return "unknown key; " + section + " has " + strings.Join(children, ", "), nil
	}
	return "unknown section; the sections are " + strings.Join(childrenOf[""], ", "), nil
}

// guesses returns the keys that a name may have been meant for: a neighbour in its section, the
// same name in a section of nearly the same name or in any, a similar name anywhere.
func guesses(section, name string) []string {
	if s := Nearest(name, childrenOf[section]); s != "" {
		return []string{join(section, s)}
	}
	if !isSection[section] && section != "" {
		var paths []string
		for _, s := range sections {
			paths = append(paths, s.path)
		}
		if path := join(Nearest(section, paths), name); keyAt[path] != nil {
			return []string{path}
		}
	}
	if paths := keysNamed[name]; len(paths) > 0 {
		return paths
	}
	return keysNamed[Nearest(name, slices.Sorted(maps.Keys(keysNamed)))]
}

func mentioned(sentence string) []string {
	var paths []string
	for _, word := range strings.Fields(sentence) {
		if word = strings.Trim(word, "?,;:()"); keyAt[word] != nil {
			paths = append(paths, word)
		}
	}
	return paths
}

func join(section, name string) string {
	if section == "" {
		return name
	}
	return section + "." + name
}
