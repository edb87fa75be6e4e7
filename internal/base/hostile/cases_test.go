package hostile

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// quarter returns a header, with metadata, of q, k and v for 8 tokens.
func quarter(metadata map[string]string) string {
	meta, err := json.Marshal(metadata)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf(
		`{"__metadata__":%s,"q":{"dtype":"F32","shape":[1,8,2,4],"data_offsets":[0,256]},"k":{"dtype":"F32","shape":[1,8,`+
			`1,4],"data_offsets":[256,384]},"v":{"dtype":"F32","shape":[1,8,1,4],"data_offsets":[384,512]}}`,
		meta,
	)
}

// tensorsOf returns a header of float32 tensors with the given shapes, and the number of bytes that it claims.
func tensorsOf(shapes map[string][]int64) (string, int64) {
	var parts []string
	at := int64(0)
	for _, name := range slices.Sorted(maps.Keys(shapes)) {
		n := int64(4)
		for _, d := range shapes[name] {
			n *= d
		}
		list, _ := json.Marshal(shapes[name]) // a list of integers
		parts = append(parts, fmt.Sprintf(`"%s":{"dtype":"F32","shape":%s,"data_offsets":[%d,%d]}`, name, list, at, at+n))
		at += n
	}
	return "{" + strings.Join(parts, ",") + "}", at
}

// cases returns the inputs of cprun attention.
func cases() (all []input) {
	const path = "case.safetensors"
	add := func(name string, says []string, make func(p *sandbox)) *input {
		all = append(all, input{kind: "attention", name: name, says: says, make: func(p *sandbox) []string {
			make(p)
			return []string{"attention", "--nproc", "2", "--in", path, "--out", "out.safetensors"}
		}})
		return &all[len(all)-1]
	}
	bad := []string{path}
	for name, h := range headers() {
		add("header "+name, bad, func(p *sandbox) { p.raw(path, h.text(), h.data) })
	}
	for name, n := range lengths {
		add("length "+name, bad, func(p *sandbox) { p.write(path, binary.LittleEndian.AppendUint64(nil, n)) })
	}
	for _, kind := range unreadable {
		add("a "+kind, bad, func(p *sandbox) { p.must(irregular[kind](p, p.path(path))) })
	}
	for name, meta := range map[string]map[string]string{
		"documents overflow": {"docs": "[9223372036854775807,9223372036854775807,10]"},
		"documents overflow again": {"docs": "[4611686018427387904,4611686018427387904,4611686018427387904," +
			"4611686018427387904,8]"},
		"negative documents":    {"docs": "[-8,16]"},
		"documents too long":    {"docs": "[4,5]"},
		"documents too short":   {"docs": "[4,3]"},
		"documents of floats":   {"docs": "[1e308,8]"},
		"documents of strings":  {"docs": `["\u001b[2J"]`},
		"deep documents":        {"docs": strings.Repeat("[", 5_000_000)},
		"many documents":        {"docs": "[" + strings.Repeat("1,", 5_000_000) + "1]"},
		"a million documents":   {"docs": "[" + strings.Repeat("1,", 1_000_000) + "1]"},
		"an escape":             {"causal": escape},
		"an escape in window":   {"window": escape},
		"an escape in scale":    {"scale": escape},
		"an escape in layout":   {"layout": escape},
		"an escape in a name":   {"mask" + escape: "x"},
		"a long word":           {"causal": strings.Repeat("x", 20<<20)},
		"a long layout":         {"layout": strings.Repeat("x", 20<<20)},
		"a break":               {"causal": "x\nFORGED"},
		"a break in a name":     {"mask\nFORGED": "x"},
		"window":                {"window": "99999999999999999999"},
		"window of words":       {"window": "all"},
		"scale":                 {"scale": "1e999"},
		"scale nan":             {"scale": "nan"},
		"softcap":               {"softcap": "-1"},
		"heads":                 {"heads": "9223372036854775807", "layout": "sbhd"},
		"slices outside":        {"slices": "[[0,9,0,9,\"full\"]]"},
		"slices turned round":   {"slices": "[[5,4,0,8,\"full\"]]"},
		"slices of other masks": {"slices": "[[0,8,0,8,\"\u001b[2J\"]]"},
		"deep slices":           {"slices": strings.Repeat("[", 5_000_000)},
		"many slices": {"slices": "[" + strings.Repeat("[0,8,0,8,\"bi_causal\"],", 600_000) +
			"[0,8,0,8,\"full\"]]"},
		"slices and documents":     {"slices": "[[0,8,0,8,\"full\"]]", "docs": "[8]"},
		"lengths in keys overflow": {"docs": "[4,4]", "docs_kv": "[9223372036854775807,9223372036854775807]"},
		"lengths in keys alone":    {"docs_kv": "[8]"},
		"documents of 2 samples":   {"docs": "[[8],[8]]"},
		"documents of nulls":       {"docs": "[null,8]"},
		"window of three sides":    {"window": "1,2,3"},
		"a window below -1":        {"window": "3,-2"},
	} {
		add("metadata "+name, bad, func(p *sandbox) { p.raw(path, quarter(meta), 512) })
	}
	for name, meta := range map[string]map[string]string{
		"least window": {"window": "-9223372036854775808"}, "large window": {"window": "1099511627776", "causal": "true"},
		"empty documents": {"docs": "[0,8,0]"}, "slices": {"slices": `[[0,8,0,8,"full"],[2,5,1,8,"bi_causal"]]`},
		"each a document": {"docs": "[1,1,1,1,1,1,1,1]", "causal": "true"},
	} {
		add("good metadata "+name, nil, func(p *sandbox) { p.raw(path, quarter(meta), 512) }).good = true
	}
	for name, shapes := range map[string]map[string][]int64{
		"a terabyte":        {"q": {1, 1 << 30, 8, 32}, "k": {1, 1 << 30, 8, 32}, "v": {1, 1 << 30, 8, 32}},
		"8 terabytes":       {"q": {1, 1 << 33, 8, 32}, "k": {1, 1, 8, 32}, "v": {1, 1, 8, 32}},
		"no tensors":        {},
		"no axes":           {"q": {}, "k": {}, "v": {}},
		"32 axes":           {"q": slices.Repeat([]int64{1}, 32), "k": {1}, "v": {1}},
		"heads do not fit":  {"q": {1, 8, 3, 4}, "k": {1, 8, 2, 4}, "v": {1, 8, 2, 4}},
		"an empty sequence": {"q": {1, 0, 2, 4}, "k": {1, 0, 1, 4}, "v": {1, 0, 1, 4}},
		"a stranger":        {"q": {1, 8, 2, 4}, "k": {1, 8, 1, 4}, "v": {1, 8, 1, 4}, "score_mod": {1}},
		"packed":            {"qkv": {1, 8, 3, 3, 3}},
		"twice":             {"qkv": {1, 8, 3, 2, 4}, "q": {1, 8, 2, 4}},
	} {
		header, n := tensorsOf(shapes)
		add("shapes "+name, bad, func(p *sandbox) { p.raw(path, header, n) })
	}
	result := func(name string, says []string, make func(p *sandbox, out string) error) *input {
		return add("the result is "+name, says, func(p *sandbox) {
			p.raw(path, quarter(map[string]string{}), 512)
			p.must(make(p, p.path("out.safetensors")))
		})
	}
	for _, kind := range []string{"pipe", "folder", "zero", "socket"} {
		result("a "+kind, []string{"out.safetensors"}, irregular[kind])
	}
	for _, kind := range []string{"link", "target", "hard", "gone", "loop"} { // the link is replaced, not its target
		result("a "+kind, nil, irregular[kind]).good = true
	}
	result("the case", []string{"also --in"}, func(p *sandbox, out string) error { return os.Link(p.path(path), out) })
	sortInputs(all)
	return all
}
