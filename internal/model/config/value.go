package config

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
)

// decode reads a YAML value into the key's field. The error names the value found and the one wanted; the field is then
// undefined.
func (k *key) decode(n *yaml.Node, c *Config) error {
	field := k.at(c)
	if IsNull(n) || k.word == "auto" && n.Kind == yaml.ScalarNode && n.Value == "auto" {
		if word := map[bool]string{true: "null", false: "auto"}[IsNull(n)]; k.word != word {
			return fmt.Errorf("has no value; want %s", k.wanted())
		}
		reflect.ValueOf(field).Elem().Set(reflect.ValueOf(k.wordValue(field)))
		return nil
	}
	kind := k.kind(field)
	if err := kind.read(k, n, field); err != nil {
		return err
	}
	return kind.check(k, field)
}

// wordValue returns the value of a field for the key's word, auto or null.
func (k *key) wordValue(field any) any {
	switch field.(type) {
	case *int:
		return k.wordIs
	case *int64:
		return int64(k.wordIs)
	case *float64:
		return float64(k.wordIs)
	}
	return reflect.Zero(reflect.TypeOf(field).Elem()).Interface()
}

// isUnset reports whether a field is set to the key's word.
func (k *key) isUnset(field any) bool {
	return k.word != "" && reflect.DeepEqual(reflect.ValueOf(field).Elem().Interface(), k.wordValue(field))
}

func (k *key) integer(n *yaml.Node) (int64, error) {
	if tag := n.ShortTag(); !isPlain(n) && !isWord(n) || tag == "!!bool" || tag == "!!timestamp" {
		return 0, k.mistyped(n)
	}
	if k.word == "auto" && !strings.ContainsAny(n.Value, "0123456789") {
		return 0, fmt.Errorf("%s is not an integer; write auto, or an integer such as 8", quoted(n.Value))
	}
	return ParseSize(n.Value)
}

func (k *key) number(n *yaml.Node) (float64, error) {
	if !isPlain(n) {
		return 0, k.mistyped(n)
	}
	return ParseFloat(n.Value)
}

func (k *key) duration(n *yaml.Node) (time.Duration, error) {
	if n.Kind != yaml.ScalarNode {
		return 0, k.mistyped(n)
	}
	return ParseTime(n.Value)
}

func (k *key) boolean(n *yaml.Node) (bool, error) {
	if isPlain(n) && (n.Value == "true" || n.Value == "false") {
		return n.Value == "true", nil
	}
	if isPlain(n) {
		switch strings.ToLower(n.Value) {
		case "true", "yes", "on", "y", "1":
			return false, fmt.Errorf("%s is not a boolean; write true", clipped(n.Value))
		case "false", "no", "off", "n", "0":
			return false, fmt.Errorf("%s is not a boolean; write false", clipped(n.Value))
		}
	}
	return false, k.mistyped(n)
}

func (k *key) text(n *yaml.Node) (string, error) {
	if n.Kind != yaml.ScalarNode {
		return "", k.mistyped(n)
	}
	if len(k.allowed()) > 0 {
		return n.Value, k.choose(n.Value)
	}
	if isPlain(n) && n.ShortTag() != "!!str" {
		return "", fmt.Errorf("found %s; want text: put it in quotes", Describe(n))
	}
	if !utf8.ValidString(n.Value) || strings.ContainsFunc(n.Value, unicode.IsControl) {
		return "", fmt.Errorf("%s holds a control character or is not UTF-8; remove it", quoted(n.Value))
	}
	return n.Value, nil
}

func (k *key) reserve(n *yaml.Node) (Reserve, error) {
	if n.Kind != yaml.ScalarNode {
		return "", k.mistyped(n)
	}
	r := Reserve(n.Value)
	_, _, err := r.parse()
	return r, err
}

func (k *key) choose(word string) error {
	if slices.Contains(k.allowed(), word) {
		return nil
	}
	wanted := strings.Join(k.allowed(), ", ")
	if len(k.allowed()) == 1 {
		return fmt.Errorf("%s is not a choice; write %s, the only one in this build", quoted(word), wanted)
	}
	s := otherWords[strings.ToLower(word)]
	if !slices.Contains(k.allowed(), s) {
		s = Nearest(word, k.allowed())
	}
	if s != "" {
		return fmt.Errorf("%s is not a choice; did you mean %s? (one of %s)", quoted(word), s, wanted)
	}
	return fmt.Errorf("%s is not a choice; write one of %s", quoted(word), wanted)
}

func (k *key) pair(n *yaml.Node) (v [2]float64, err error) {
	if n.Kind != yaml.SequenceNode {
		return v, k.mistyped(n)
	}
	if len(n.Content) != 2 {
		return v, fmt.Errorf("found a list of %d; want two numbers, such as %s", len(n.Content), k.def)
	}
	for i, e := range n.Content {
		if v[i], err = k.number(e); err != nil {
			return v, fmt.Errorf("number %d of 2: %w", i+1, err)
		}
	}
	return v, nil
}

// listOf returns a reader of lists of a type.
func listOf[T any](read func(*key, *yaml.Node) (T, error)) func(*key, *yaml.Node) ([]T, error) {
	return func(k *key, n *yaml.Node) (list []T, err error) {
		if n.Kind != yaml.SequenceNode {
			return nil, k.mistyped(n)
		}
		for i, e := range n.Content {
			v, err := read(k, e)
			if err != nil {
				return nil, fmt.Errorf("entry %d: %w", i+1, err)
			}
			list = append(list, v)
		}
		return list, nil
	}
}

// eachOf returns a check of lists of a type.
func eachOf[T any](check func(*key, T) error) func(*key, []T) error {
	return func(k *key, list []T) error {
		for i, v := range list {
			if err := check(k, v); err != nil {
				return fmt.Errorf("entry %d: %w", i+1, err)
			}
		}
		return nil
	}
}

// listValue returns a list for JSON.
func listValue[T any](value func(T) any) func([]T) any {
	return func(list []T) any {
		all := make([]any, len(list))
		for i, v := range list {
			all[i] = value(v)
		}
		return all
	}
}

func (k *key) mistyped(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode && !isPlain(n) {
		return fmt.Errorf("found %s; want %s; remove the quotes", Describe(n), k.wanted())
	}
	return fmt.Errorf("found %s; want %s", Describe(n), k.wanted())
}

func (k *key) wanted() string {
	kind, words := k.kind(k.at(blankConfig())).name, strings.Join(k.allowed(), ", ")
	switch {
	case kind == "list":
		kind += " of " + cmp.Or(words, "names")
	case kind == "text" && words != "":
		return "one of " + words
	case strings.HasPrefix(kind, "a share"), strings.HasPrefix(kind, "text or"):
		return kind
	}
	switch {
	case k.word != "":
		return kind + " or " + k.word
	case kind == "integer":
		return "an integer"
	case kind == "number" || kind == "time" || strings.HasPrefix(kind, "list"):
		return "a " + kind
	}
	return kind
}

func (k *key) checkWord(word string) error {
	if len(k.allowed()) == 0 {
		return nil
	}
	return k.choose(word)
}

func (k *key) checkInt(v int64) error { return hf.CheckInt(v, k.min, k.max) }

func (k *key) checkFloat(v float64) error { return hf.CheckNumber(v, k.within) }

// checkTime allows 0 unless the key has a word for it.
func (k *key) checkTime(d time.Duration) error {
	if d < k.least && (d != 0 || k.word != "") {
		return fmt.Errorf("%s is too short; the least is %s", FormatTime(d), FormatTime(k.least))
	}
	return nil
}

func isPlain(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode &&
		n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) == 0
}

// isWord reports whether a scalar is text both with and without quotes, such as 128K. YAML treats the two as equal, and
// writers of JSON quote every such word.
func isWord(n *yaml.Node) bool {
	bare := yaml.Node{Kind: yaml.ScalarNode, Value: n.Value}
	return n.Kind == yaml.ScalarNode && bare.ShortTag() == "!!str"
}

// IsNull reports whether a value is null or empty.
func IsNull(n *yaml.Node) bool {
	return isPlain(n) && slices.Contains([]string{"", "~", "null", "Null", "NULL"}, n.Value)
}

// Describe returns the type and the text of a value, for an error about a wrong type.
func Describe(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case IsNull(n):
		return "nothing"
	case !isPlain(n):
		return "the text " + quoted(n.Value)
	}
	switch n.ShortTag() {
	case "!!bool":
		return "the boolean " + clipped(n.Value)
	case "!!int", "!!float":
		return "the number " + clipped(n.Value)
	case "!!timestamp":
		return "the date " + clipped(n.Value)
	}
	return "the text " + quoted(n.Value)
}

// A kind implements the keys of one Go type.
type kind struct {
	name  string
	read  func(k *key, n *yaml.Node, field any) error
	check func(k *key, field any) error // the bounds of a value
	value func(field any) any           // for JSON: bool, int64, float64, string, []any
}

var kinds = map[reflect.Type]kind{} // by pointer type of the field; filled by init, since errors use it

func (k *key) kind(field any) kind {
	found, ok := kinds[reflect.TypeOf(field)]
	if !ok {
		panic(fmt.Sprintf("config: key %s has a field of type %T", k.path, field))
	}
	return found
}

// addKind registers a type. A nil check has no bounds.
func addKind[T any](name string, read func(*key, *yaml.Node) (T, error), check func(*key, T) error, value func(T) any) {
	known := kind{
		name: name,
		read: func(k *key, n *yaml.Node, field any) error {
			v, err := read(k, n)
			if err == nil {
				*field.(*T) = v
			}
			return err
		},
		check: func(k *key, field any) error {
			if check == nil {
				return nil
			}
			return check(k, *field.(*T))
		},
		value: func(field any) any { return value(*field.(*T)) },
	}
	kinds[reflect.TypeFor[*T]()] = known
}

// optional registers the pointer to a type, with nil for the key's word.
func optional[T any](name string, read func(*key, *yaml.Node) (T, error), check func(*key, T) error) {
	addKind(name, func(k *key, n *yaml.Node) (*T, error) {
		v, err := read(k, n)
		return &v, err
	}, func(k *key, p *T) error {
		if check == nil {
			return nil
		}
		return check(k, *p)
	}, func(p *T) any { return *p })
}

func identity[T any](v T) any { return v }

func init() {
	readInt := func(k *key, n *yaml.Node) (int, error) { v, err := k.integer(n); return int(v), err }
	checkInt := func(k *key, v int) error { return k.checkInt(int64(v)) }
	asInt := func(v int) any { return int64(v) }
	addKind("integer", readInt, checkInt, asInt)
	addKind("list of integers", listOf(readInt), eachOf(checkInt), listValue(asInt))
	addKind("list of numbers", listOf((*key).number), eachOf((*key).checkFloat), listValue(identity[float64]))
	addKind("integer", (*key).integer, (*key).checkInt, identity[int64])
	addKind("number", (*key).number, (*key).checkFloat, identity[float64])
	optional("number", (*key).number, (*key).checkFloat)
	addKind("true or false", (*key).boolean, nil, identity[bool])
	optional[bool]("true or false", (*key).boolean, nil)
	addKind("text", (*key).text, (*key).checkWord, identity[string])
	addKind("text", func(k *key, n *yaml.Node) (partition.LayoutName, error) {
		name, err := k.text(n)
		return partition.LayoutName(name), err
	}, nil, func(n partition.LayoutName) any { return string(n) })
	addKind("time", (*key).duration, (*key).checkTime, func(d time.Duration) any { return FormatTime(d) })
	addKind("list of two numbers", (*key).pair, func(k *key, v [2]float64) error {
		return cmp.Or(k.checkFloat(v[0]), k.checkFloat(v[1]))
	}, func(v [2]float64) any { return []any{v[0], v[1]} })
	addKind("list", listOf((*key).text), eachOf((*key).checkWord), listValue(identity[string]))
	addKind("a share such as 3%, a size, or auto", (*key).reserve, nil, func(r Reserve) any { return string(r) })
	addKind("text or a list of texts or of {path, weight}", (*key).files, nil, Files.value)
}
