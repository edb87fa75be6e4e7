package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/cprun/cprun/internal/model/hf"
)

// MaxFile bounds a config in bytes. The parser's tree takes up to a hundred times the text.
const MaxFile = 1 << 20

// A source holds the given values by path, before decoding. Later passes (flags) replace values of earlier ones (the
// file).
type source struct {
	*faults
	values       map[string]*yaml.Node
	passOf       map[string]int
	pass         int
	listed       bool     // a fault has listed the sections
	meant        []string // keys and sections that unknown names probably mean
	deprecations *faults  // warnings about former names and keys, and the EOS
	inFile       func(n *yaml.Node) position
}

func newSource(f *faults) *source {
	return &source{faults: f, values: map[string]*yaml.Node{}, passOf: map[string]int{},
		deprecations: newFaults(f.where)}
}

const leastConfig = "the least config names data.path and the model, see docs/config.md"

func (s *source) readFile(name string, text []byte) {
	s.pass++
	if root := s.parse(name, text, leastConfig, "sections, such as data: {path: corpus/*.bin}"); root != nil {
		s.mapping(root, "")
	}
}

// parse returns the mapping of a file, or nil and adds the faults. For them, least describes the missing contents of an
// empty file, and want the expected ones.
func (s *source) parse(name string, text []byte, least, want string) *yaml.Node {
	s.inFile = func(n *yaml.Node) position { return position{name, max(n.Line, 1)} }
	first := position{name, 1}
	if len(text) > MaxFile {
		s.addAt(first, "", "the file has %d bytes; a config has at most %d", len(text), MaxFile)
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc, next yaml.Node
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		s.addAt(first, "", "the file is empty; %s", least)
		return nil
	} else if err != nil {
		s.notYAML(name, text, err)
		return nil
	}
	switch err := dec.Decode(&next); {
	case err == nil:
		s.addAt(s.inFile(&next), "", "a second YAML document begins here, and a config is one document; remove the ---")
	case !errors.Is(err, io.EOF):
		s.notYAML(name, text, err)
	}
	root := doc.Content[0]
	if IsNull(root) {
		s.addAt(s.inFile(root), "", "the file is empty; %s", least)
		return nil
	}
	if root.Kind != yaml.MappingNode {
		s.addAt(s.inFile(root), "", "found %s; want %s", Describe(root), want)
		return nil
	}
	s.vet(root)
	return root
}

var (
	yamlLine   = regexp.MustCompile(`^yaml: line (\d+): (.*)$`)
	fromParser = regexp.MustCompile(`^did not find expected (<|node content|'-' indicator|key|',' or)`)
)

// notYAML reports an error of the YAML library at its line, with the usual cause.
func (s *source) notYAML(name string, text []byte, err error) {
	at, msg := position{name, 1}, strings.TrimPrefix(err.Error(), "yaml: ")
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		at.line, _ = strconv.Atoi(m[1])
		at.line, msg = max(at.line, 1), m[2]
		if fromParser.MatchString(msg) {
			at.line++ // the library's parser counts lines from 0, its scanner from 1
		}
	}
	hint := ""
	switch {
	case strings.Contains(msg, "UTF-8"), strings.Contains(msg, "Unicode"), strings.Contains(msg, "control characters"):
		hint = "; save the file as plain text in UTF-8"
		at.line = bytes.Count(text[:unreadable(text)], []byte("\n")) + 1 // the library gives no line
	case strings.Contains(msg, "unknown anchor"):
		hint = `; put a value that begins with * in quotes: "*.bin"`
		if _, anchor, ok := strings.Cut(msg, "'"); ok {
			anchor, _, _ = strings.Cut(anchor, "'")
			before, _, _ := bytes.Cut(text, []byte("*"+anchor))
			at.line = bytes.Count(before, []byte("\n")) + 1
		}
	case strings.Contains(msg, "alphabetic or numeric"):
		hint = `; put a value that begins with * or & in quotes: "*.bin"`
	case strings.Contains(msg, "cannot start any token"):
		hint = "; indent with spaces, not tabs, and put values that begin with @, ` or % in quotes"
	case strings.Contains(msg, "',' or"):
		hint = "; a { or [ that begins here is not closed, or lacks a comma"
	case strings.Contains(msg, "expected key"), strings.Contains(msg, "'-' indicator"):
		hint = "; a line of this section is indented differently from the others"
	case strings.Contains(msg, "mapping values are not allowed"):
		hint = "; a key or a space before it is out of line, or a value with a colon lacks quotes"
	}
	s.addAt(at, "", "not YAML: %s%s", clipped(msg), hint)
}

// unreadable returns the index of the first byte that is not UTF-8 text.
func unreadable(text []byte) int {
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRune(text[i:])
		if r == utf8.RuneError && n == 1 || unicode.IsControl(r) && !strings.ContainsRune("\t\n\r\u0085", r) {
			return i
		}
		i += n
	}
	return 0
}

// vet refuses YAML features that a config does not need: aliases can make a small file huge, and tags change the
// meaning of a word.
func (s *source) vet(n *yaml.Node) {
	switch {
	case n.Kind == yaml.AliasNode:
		s.addAt(s.inFile(n), "", "the alias *%s: YAML aliases are not supported; write the value "+
			"itself, or put it in quotes if it begins with *", clipped(n.Value))
	case n.Anchor != "":
		s.addAt(s.inFile(n), "", "the anchor &%s: YAML anchors are not supported; remove it", clipped(n.Anchor))
	case n.Style&yaml.TaggedStyle != 0:
		s.addAt(s.inFile(n), "", "the tag %s: YAML tags are not supported; remove it", clipped(n.ShortTag()))
	}
	for _, child := range n.Content {
		s.vet(child)
	}
}

func (s *source) mapping(n *yaml.Node, section string) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		at := s.inFile(name)
		if name.Kind != yaml.ScalarNode {
			s.addAt(at, section, "found %s; want a key", Describe(name))
			continue
		}
		path := join(section, name.Value)
		if strings.Contains(name.Value, ".") { // a path is for --set; here it would hide a section
			path = ""
		}
		s.assign(s.currentName(path, at), section, name.Value, value, at)
	}
}

func (s *source) currentName(path string, at position) string {
	if other, ok := renames[path]; ok {
		return other
	}
	if other, ok := renamed[path]; ok {
		s.deprecations.addAt(at, path, "was renamed to %s; use the new name", other)
		return other
	}
	return path
}

func (s *source) assign(path, section, name string, value *yaml.Node, at position) {
	if values := retired[path]; slices.Contains(values, value.Value) {
		s.deprecations.addAt(at, path, "has no effect; remove it")
		return
	}
	if keyAt[path] == nil && !isSection[path] {
		if len(s.list) > maxFaults { // count only: suggestions take long
			s.addAt(at, section, "unknown")
			return
		}
		if value.Kind == yaml.MappingNode && section == "" && slices.Contains(foreignSections, name) {
			s.mapping(value, name) // its keys say more
			return
		}
		msg, meant := unknownKey(section, name)
		if strings.HasPrefix(msg, unknownSection) {
			msg = msg[:map[bool]int{true: len(unknownSection), false: len(msg)}[s.listed]] // the sections once
			s.listed = true
		}
		s.addAt(at, join(section, clipped(name)), "%s", msg)
		s.meant = append(s.meant, meant...)
		return
	}
	if s.passOf[path] == s.pass {
		s.addAt(at, path, "given twice, first on line %d", s.where.keys[path].line)
		return
	}
	s.passOf[path] = s.pass
	s.where.keys[path] = at
	if value.Kind == yaml.AliasNode { // vet reports it
		s.bad[path] = true
		return
	}
	switch {
	case !isSection[path]:
		s.values[path] = value
	case isOptional(path):
		delete(s.values, path)
		s.drop(path)
		if IsNull(value) {
			s.values[path] = value
			return
		}
		fallthrough
	default:
		if IsNull(value) || value.Kind == yaml.MappingNode && len(value.Content) == 0 { // all defaults
			s.drop(path)
		}
		if value.Kind == yaml.MappingNode {
			s.mapping(value, path)
		} else if !IsNull(value) {
			s.addAt(at, path, "found %s; want a mapping of %s", Describe(value), strings.Join(childrenOf[path], ", "))
		}
	}
	if section, _ := split(path); isOptional(section) {
		delete(s.values, section)
	}
}

// skipMeant marks absent keys that an unknown name or section probably means. Later rules skip them, since "missing"
// would report the same mistake twice.
func (s *source) skipMeant() {
	for i := range keys {
		path := keys[i].path
		isMeant := slices.ContainsFunc(s.meant, func(m string) bool {
			return path == m ||
				strings.HasPrefix(path, m+".")
		})
		if isMeant && s.values[path] == nil {
			s.bad[path] = true
		}
	}
}

// chooseOne refuses two keys of which one replaces the other, if both are set. A flag replaces the file's key.
func (s *source) chooseOne(a, b string) { s.choose(a, b, false) }

// choose does it too if both may be set at one place.
func (s *source) choose(a, b string, both bool) {
	if s.values[a] == nil || s.values[b] == nil || IsNull(s.values[a]) || IsNull(s.values[b]) {
		return
	}
	switch flagA, flagB := s.where.of(a).line == 0, s.where.of(b).line == 0; {
	case flagA == flagB && both:
	case flagA == flagB:
		s.add(b, "%s is set too, and one replaces the other; remove one of them", a)
	case flagA:
		s.forget(b)
	default:
		s.forget(a)
	}
}

// drop forgets the values of a section's keys.
func (s *source) drop(section string) {
	for path := range s.where.keys {
		if strings.HasPrefix(path, section+".") {
			s.forget(path)
		}
	}
}

func (s *source) forget(path string) {
	delete(s.values, path)
	delete(s.where.keys, path)
	delete(s.bad, path)
}

func (s *source) readFlag(arg string) {
	at := position{file: "--set " + clipped(arg)}
	path, text, ok := strings.Cut(arg, "=")
	path = strings.TrimSpace(path)
	if !ok || path == "" {
		s.addAt(at, "", "want key.path=value, such as train.steps=10")
		return
	}
	path = s.currentName(path, at)
	section, name := split(path)
	value, err := flagValue(path, text)
	if err != nil {
		s.addAt(at, clipped(path), "%v", err)
		return
	}
	s.pass++
	s.inFile = func(*yaml.Node) position { return at }
	delete(s.bad, path) // replaces a faulty value of the file
	s.vet(value)
	s.assign(path, section, name, value, at)
}

// flagValue reads the value of a flag: literally for text, so that *.bin and :9090 need no quotes inside the shell's;
// else as YAML.
func flagValue(path, text string) (*yaml.Node, error) {
	if len(text) > MaxFile {
		return nil, fmt.Errorf("the value has %d bytes; the most is %d", len(text), MaxFile)
	}
	if k := keyAt[path]; k != nil {
		if _, isText := k.at(blankConfig()).(*string); isText && text != "null" {
			return textNode(text), nil
		}
		switch k.at(blankConfig()).(type) {
		case *Files, *hf.Modules:
			if !strings.HasPrefix(text, "[") && text != "null" {
				return textNode(text), nil
			}
		}
	}
	return parseValue(text)
}

func textNode(text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Style: yaml.DoubleQuotedStyle, Tag: "!!str", Value: text}
}

// parseValue reads one YAML value, such as a default of the table.
func parseValue(text string) (*yaml.Node, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		return nil, fmt.Errorf("not a YAML value: %s", clipped(strings.TrimPrefix(err.Error(), "yaml: ")))
	}
	if len(doc.Content) == 0 {
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null"}, nil
	}
	return doc.Content[0], nil
}
