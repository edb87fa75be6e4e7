package hostile

import (
	"cmp"
	"os"
	"slices"
	"strings"
	"unicode/utf8"
)

// sortInputs sorts inputs from maps, so that their order is fixed.
func sortInputs(all []input) {
	slices.SortStableFunc(all, func(a, b input) int { return cmp.Compare(a.name, b.name) })
}

// badNames lists file names with control sequences, or that look like output of cprun.
var badNames = []string{
	"x" + escape + ".yaml", "a\nFORGED done in 0s", "\rcprun: done", "\xff\xfe.yaml", strings.Repeat("long", 60) + ".yaml",
	"a\tb\x7f.yaml", "-", "--", "a\u2028b.yaml", "\x1b",
}

// names returns inputs with these names as arguments, for every command that takes one.
func names() (all []input) {
	for _, bad := range badNames {
		for name, args := range map[string][]string{
			"train":           {"./" + bad},
			"plan":            {"plan", "./" + bad},
			"export":          {"export", "./" + bad, "--to", "out"},
			"export to":       {"export", "run", "--to", bad + "/x/y"},
			"eval":            {"eval", "./" + bad, "--data", "text.txt"},
			"top":             {"top", "./" + bad},
			"generate":        {"generate", "./" + bad, "--prompt", "x"},
			"generate prompt": {"generate", "run", "--prompt-file", bad},
			"generate words":  {"generate", "run", "--prompt", "x", "--tokenizer", bad},
			"eval data":       {"eval", "run", "--data", bad},
			"resume":          {"--resume", bad, "--run-dir", "run", "train.yaml"},
			"attention in":    {"attention", "--in", bad, "--out", "out"},
			"attention out":   {"attention", "--in", "case", "--out", bad + "/x"},
			"bench json":      {"bench", "ops", "--json", bad + "/x/y"},
			"set":             {"plan", "--set", bad, "train.yaml"},
			"set key":         {"plan", "--set", "model." + bad + "=1", "train.yaml"},
			"set path":        {"plan", "--set", "data.path=" + bad, "--set", "train.steps=x", "train.yaml"},
			"set from":        {"plan", "--set", "model.from=" + bad, "--set", "train.steps=x", "train.yaml"},
			"command":         {bad, bad},
			"flag":            {"--" + bad, "train.yaml"},
			"flag's value":    {"--nproc", bad, "train.yaml"},
			"device":          {"--device", bad, "train.yaml"},
			"level":           {"--log-level", bad, "train.yaml"},
			"rendezvous":      {"--rendezvous", bad, "train.yaml"},
			"nnodes":          {"--nnodes", bad, "train.yaml"},
			"assume":          {"plan", "--assume", bad, "train.yaml"},
			"dtype":           {"export", "run", "--to", "out", "--dtype", bad},
			"help":            {"help", bad},
			"bench":           {"bench", bad},
			"bench sizes":     {"bench", "comm", "--sizes", bad},
			"attention words": {"attention", "--in", "x", "--out", "y", "--layout", bad, "--backend", bad},
		} {
			all = append(all, input{kind: "name", name: name + " " + bad, fail: true, make: func(p *sandbox) []string {
				p.small()
				return args
			}})
		}
		// Also an existing file of that name.
		text := utf8.ValidString(bad)
		all = append(all, input{kind: "name", name: "a real " + bad, good: text, fail: !text,
			make: func(p *sandbox) []string {
				p.small()
				p.must(os.Rename(p.path("train.yaml"), p.path(bad)))
				return []string{"--run-dir", "./run" + bad, "./" + bad}
			}})
	}
	for i := range all {
		all[i].name = clean.Replace(all[i].name)
	}
	sortInputs(all)
	return all
}

// clean converts a name to the name of a subtest.
var clean = strings.NewReplacer("/", "_", "\n", "_")

// environments returns hostile values of environment variables that cprun reads.
func environments() (all []input) {
	add := func(name string, env []string, make func(p *sandbox) []string) *input {
		all = append(all, input{kind: "environment", name: name, env: env, make: make})
		return &all[len(all)-1]
	}
	for _, name := range []string{"NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_DEBUG", "NVTE_DEBUG_LEVEL"} {
		for _, value := range []string{escape, "", "99999999999999999999", "0\nFORGED", strings.Repeat("9", 100_000)} {
			in := add(name, []string{name + "=" + value}, func(p *sandbox) []string { return []string{"plan", p.small()} })
			in.says = []string{name}
		}
	}
	for _, set := range [][]string{
		{"NVTE_DEBUG=1", "NVTE_DEBUG_LEVEL=2147483647"}, {"CUDA_VISIBLE_DEVICES=" + escape}, {"TERM=" + escape},
		{"XDG_RUNTIME_DIR=/proc"}, {"XDG_CACHE_HOME=" + escape},
		{"CPRUN_RUN_ID=" + escape}, {"RANK=" + escape, "WORLD_SIZE=-1"}, {"GOMEMLIMIT=1GiB"},
		{"XDG_RUNTIME_DIR=" + strings.Repeat("/x", 2000)},
	} {
		name, _, _ := strings.Cut(set[0], "=")
		add("train with "+name, set, func(p *sandbox) []string {
			return []string{"--nproc", "2", "--run-dir", "run", p.small()}
		}).good = !slices.Contains(set, "WORLD_SIZE=-1")
		add("doctor with "+name, set, func(*sandbox) []string { return []string{"doctor"} }).fail = true
	}
	for _, role := range []string{"train", "bench", escape, ""} { // only the launcher starts these
		add("worker", []string{"CPRUN_RUN_ID=x"}, func(*sandbox) []string { return []string{"worker", role} })
	}
	return all
}
