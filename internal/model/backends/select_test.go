package backends

import (
	"bufio"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// mutate changes one rule before the tests run. They must then fail: scripts/mutate -rules checks that for every rule.
var mutate = flag.String("mutate", "", "`id:remove` or id:invert: spoil one rule of the table")

func TestMain(m *testing.M) {
	flag.Parse()
	if *mutate != "" {
		if err := spoil(*mutate); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
	}
	os.Exit(m.Run())
}

func spoil(spec string) error {
	id, how, _ := strings.Cut(spec, ":")
	i := slices.IndexFunc(rules, func(r Rule) bool { return r.ID == id })
	if i < 0 {
		return fmt.Errorf("mutate %q: no such rule", id)
	}
	applies := rules[i].When
	switch how {
	case "remove":
		rules[i].When = func(*Call) bool { return false }
	case "invert":
		rules[i].When = func(c *Call) bool { return !applies(c) }
	default:
		return fmt.Errorf("mutate %q: want remove or invert", spec)
	}
	return nil
}

// A row is one line of testdata/select.txt.
type row struct {
	line   int
	text   string
	params Params
	answer
	rules []string
}

// An answer is the expected backend, Auto for none, and the kinds of its remedies.
type answer struct {
	backend  Backend
	remedies []string
}

func defaults() Params {
	return Params{
		Arch: 90, CUDNN: V(9, 19, 0), Flash: V(1, 0, 0), DType: tensor.BF16,
		Batch: 1, SeqQ: 4096, SeqKV: 4096, Heads: 16, KVHeads: 16, HeadDim: 128, HeadDimV: 128,
		Causal: true, WindowLeft: -1, WindowRight: 0, Training: true, ContextSize: 1,
		Algorithm: "ring", Layout: "zigzag",
	}
}

func with(changes string) Params {
	p := defaults()
	if err := set1(&p, changes); err != nil {
		panic(err)
	}
	return p
}

func set1(p *Params, changes string) error {
	for _, f := range strings.Fields(changes) {
		k, v, _ := strings.Cut(f, "=")
		if err := setField(p, k, v); err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
	}
	return nil
}

func setField(p *Params, k, v string) error {
	n, notInt := strconv.Atoi(v)
	ints := map[string][]*int{
		"arch": {&p.Arch}, "batch": {&p.Batch}, "s": {&p.SeqQ, &p.SeqKV}, "sq": {&p.SeqQ}, "skv": {&p.SeqKV},
		"h": {&p.Heads, &p.KVHeads}, "g": {&p.KVHeads}, "d": {&p.HeadDim, &p.HeadDimV}, "dv": {&p.HeadDimV},
		"cp": {&p.ContextSize}, "inner": {&p.InnerSize},
	}
	bools := map[string]*bool{
		"softcap": &p.Softcap, "sink": &p.Sink, "bias": &p.Bias, "maxlogit": &p.MaxLogit, "docs": &p.Documents,
		"train": &p.Training, "det": &p.Deterministic, "scale0": &p.ScaleNotAbove0,
		"topleft": &p.TopLeft, "dockeys": &p.DocumentKeys, "slices": &p.Slices,
	}
	if at, ok := ints[k]; ok {
		for _, i := range at {
			*i = n
		}
		return notInt
	}
	if at, ok := bools[k]; ok {
		*at = n == 1
		return notInt
	}
	return setName(p, k, v)
}

func setName(p *Params, k, v string) (err error) {
	switch k {
	case "cudnn":
		p.CUDNN, err = ParseVersion(v)
	case "flash":
		p.Flash, err = ParseVersion(v)
	case "mem":
		p.Memory, err = strconv.ParseInt(v, 10, 64)
	case "alg":
		p.Algorithm = v
	case "layout":
		p.Layout = partition.LayoutName(v)
	case "want":
		p.Want, err = ParseBackend(v)
	case "off":
		for _, s := range strings.Split(v, ",") {
			var b Backend
			b, err = ParseBackend(s)
			p.Disabled |= 1 << b
		}
	case "mask":
		p.Causal = v == "causal"
		if p.WindowRight = -1; p.Causal {
			p.WindowRight = 0
		}
	case "window":
		l, r, both := strings.Cut(v, ",")
		if p.WindowLeft, err = strconv.Atoi(l); both && err == nil {
			p.WindowRight, err = strconv.Atoi(r)
		}
	case "dtype":
		p.DType = map[string]tensor.DType{"bf16": tensor.BF16, "fp16": tensor.F16, "fp32": tensor.F32,
			"fp64": tensor.F64}[v]
	default:
		return fmt.Errorf("no key %q", k)
	}
	return err
}

func readRows(t testing.TB) []row {
	t.Helper()
	f, err := os.Open("testdata/select.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var rows []row
	s := bufio.NewScanner(f)
	for n := 1; s.Scan(); n++ {
		line := strings.TrimSpace(s.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		r, err := parseRow(line)
		if err != nil {
			t.Fatalf("testdata/select.txt:%d: %v", n, err)
		}
		r.line = n
		rows = append(rows, r)
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	return rows
}

func parseRow(line string) (r row, err error) {
	in, out, ok := strings.Cut(line, "=>")
	if !ok {
		return r, fmt.Errorf("no =>")
	}
	r.text, r.params = line, defaults()
	if err := set1(&r.params, in); err != nil {
		return r, err
	}
	head, ids, _ := strings.Cut(out, ";")
	r.answer, err = parseAnswer(head)
	r.rules = strings.Fields(ids)
	slices.Sort(r.rules)
	return r, err
}

// parseAnswer reads "flash", "fused +pad-sequence,split-call" or "none".
func parseAnswer(s string) (a answer, err error) {
	backend, remedies, cured := strings.Cut(strings.TrimSpace(s), " +")
	if backend != "none" {
		a.backend, err = ParseBackend(backend)
	}
	if cured {
		a.remedies = strings.Split(remedies, ",")
	}
	return a, err
}

// rejectingRules returns the sorted ids of the rules that reject a backend of the set.
func rejectingRules(t testing.TB, p Params, of map[Backend]bool) []string {
	t.Helper()
	p, err := p.checked()
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for b := range of {
		for _, r := range evaluate(b, p, hopsOf(p)).rejections {
			if !slices.Contains(ids, r.Rule) {
				ids = append(ids, r.Rule)
			}
		}
	}
	slices.Sort(ids)
	return ids
}

var every = map[Backend]bool{Flash: true, Fused: true, Reference: true}

func TestSelectTable(t *testing.T) {
	rows := readRows(t)
	for _, r := range rows {
		at := fmt.Sprintf("select.txt:%d: %s", r.line, r.text)
		if got := rejectingRules(t, r.params, every); !slices.Equal(got, r.rules) {
			t.Errorf("%s\n got rules %s", at, strings.Join(got, " "))
		}
		if got, remedies := outcomeOf(t, r.params); got != r.backend || !slices.Equal(remedies, r.remedies) {
			t.Errorf("%s\n got backend %s, remedies %v", at, got, remedies)
		}
	}
}

func outcomeOf(t testing.TB, p Params) (Backend, []string) {
	t.Helper()
	c, err := Select(p)
	if err != nil {
		if _, ok := err.(*NoBackendError); !ok {
			t.Fatal(err)
		}
		return Auto, nil
	}
	var kinds []string
	for _, a := range c.Remedies {
		if !slices.Contains(kinds, string(a.Kind)) {
			kinds = append(kinds, string(a.Kind))
		}
	}
	slices.Sort(kinds)
	return c.Backend, kinds
}

// TestEveryRuleIsInTheTable checks that each rule applies to one row and not to another. Warnings choose nothing.
func TestEveryRuleIsInTheTable(t *testing.T) {
	rows := readRows(t)
	for _, rule := range rules {
		if rule.Warns {
			continue
		}
		applies, silent := false, false
		for _, r := range rows {
			if slices.Contains(r.rules, rule.ID) {
				applies = true
			} else {
				silent = true
			}
		}
		if !applies || !silent {
			t.Errorf("rule %s: speaks in a row: %t, is silent in one: %t", rule.ID, applies, silent)
		}
	}
	for _, r := range rows {
		for _, id := range r.rules {
			if !slices.ContainsFunc(rules, func(x Rule) bool { return x.ID == id }) {
				t.Errorf("select.txt:%d: no rule %s", r.line, id)
			}
		}
	}
}

// TestBothSidesOfEveryVersion checks that for each version of a rule a row has exactly that version, and that the rule
// changes one patch earlier.
func TestBothSidesOfEveryVersion(t *testing.T) {
	rows := readRows(t)
	for _, rule := range rules {
		for _, v := range []Version{rule.Since, rule.Until} {
			if v == 0 {
				continue
			}
			found := slices.ContainsFunc(rows, func(r row) bool {
				if r.params.CUDNN != v {
					return false
				}
				before := r.params
				before.CUDNN = v - 1
				own := map[Backend]bool{rule.Backend: true}
				return slices.Contains(r.rules, rule.ID) != slices.Contains(rejectingRules(t, before, own), rule.ID)
			})
			if !found {
				t.Errorf("rule %s: no row at version %s that differs from the one before", rule.ID, v)
			}
		}
	}
}
