package hostile

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model/checkpoint/checkpointtest"
)

// trained makes a run of two ranks and two steps, once, and returns its directory.
var trained = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp(filepath.Dir(program), "trained-")
	if err != nil {
		return "", err
	}
	for name, data := range map[string][]byte{"train.yaml": []byte(yaml),
		"text.txt": bytes.Repeat([]byte("all that is solid melts into air. "), 40)} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return "", err
		}
	}
	c := exec.Command(program, "--nproc", "2", "--run-dir", "run", "--set", "log.trace_steps=1", "train.yaml")
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return dir, nil
})

// ran copies the run into the sandbox.
func (p *sandbox) ran() {
	dir, err := trained()
	p.must(err)
	p.small()
	p.must(os.CopyFS(p.path("run"), os.DirFS(filepath.Join(dir, "run"))))
}

// manifest replaces text in the manifest of a checkpoint, n times at most.
func (p *sandbox) manifest(dir, old, text string, n int) {
	path := p.path("run/" + dir + "manifest.json")
	changed := bytes.Replace(must.Have(os.ReadFile(path)), []byte(old), []byte(text), n)
	p.must(os.WriteFile(path, checkpointtest.Summed(changed), 0o644))
}

// first and second are the run's checkpoints.
const first, second = "checkpoints/step-00000001/", "checkpoints/step-00000002/"

// written lists the names in a run directory that a run writes or reads.
var written = []string{
	"config.yaml", "plan.json", "metrics.jsonl", "trace.json", "logs", "logs/rank-0000.log", "logs/launcher.log",
	"logs/status-0000.json", "logs/trace-rank-0001.json", "checkpoints", "checkpoints/latest", "checkpoints/.lock",
	"checkpoints/step-00000002", "checkpoints/step-00000003", second + "manifest.json",
	second + "shard-00001-of-00002.safetensors",
}

// spoiled lists the files that a run rewrites if they are missing or invalid.
var spoiled = map[string]bool{"plan.json": true, "trace.json": true, "checkpoints/latest": true}

// runs returns hostile run directories and checkpoints.
func runs() (all []input) {
	resume := func(*sandbox) []string {
		return []string{"--nproc", "2", "--run-dir", "run", "--set", "train.steps=3", "--set", "log.trace_steps=1",
			"train.yaml"}
	}
	export := func(*sandbox) []string { return []string{"export", "run", "--to", "hf"} }
	write := func(*sandbox) []string {
		return []string{"generate", "run", "--prompt", "a", "--max-tokens", "1", "--temperature", "0"}
	}
	watch := func(*sandbox) []string { return []string{"top", "run"} }
	add := func(name string, make func(p *sandbox), commands ...func(*sandbox) []string) {
		for _, command := range commands {
			all = append(all, input{kind: "run", name: name, fail: true, make: func(p *sandbox) []string {
				p.ran()
				make(p)
				return command(p)
			}})
		}
	}
	for _, file := range written {
		path := "run/" + file
		for kind, make := range irregular {
			add("top, and "+file+" is a "+kind, func(p *sandbox) {
				p.must(os.RemoveAll(p.path(path)))
				p.must(make(p, p.path(path)))
			}, watch)
			add(file+" is a "+kind, func(p *sandbox) {
				p.must(os.RemoveAll(p.path(path)))
				p.must(make(p, p.path(path)))
			}, resume)
			if spoiled[file] && kind != "huge" && kind != "hard" { // the entry itself is replaced, and the run is valid
				all[len(all)-1].good = kind != "folder"
			}
		}
		for kind, data := range map[string][]byte{
			"garbage": []byte(escape + "\nFORGED\n"), "empty": nil, "long": bytes.Repeat([]byte("{"), 1<<20),
			"lines": bytes.Repeat([]byte("{}\n"), 1<<18), "deep": bytes.Repeat([]byte("["), 1<<22),
		} {
			add(file+" is "+kind, func(p *sandbox) {
				p.must(os.RemoveAll(p.path(path)))
				p.write(path, data)
			}, resume, export, write, watch)
		}
	}
	for name, text := range map[string]string{
		"words": `{"version":1,"run_id":"` + `\u001b[2J","host":"\u009b2J\nFORGED","state":"\u202e",` +
			`"why":"\u001b]0;x\u0007","rows":[{"rank":0,"state":"\u001b[31m","host":"\u001b"}]}`,
		"numbers": `{"version":1,"state":"running","pid":-1,"ranks":9223372036854775807,"first_rank":9223372036854775807,` +
			`"start":-5,"world_size":9223372036854775807,"every_seconds":-1,"written":"9999-12-31T23:59:59Z",` +
			`"begun":"0001-01-01T00:00:00Z","rows":[{"rank":9223372036854775807,"pid":1,"resident_bytes":9223372036854775807,` +
			`"in":-9223372036854775808}]}`,
		"ranks": `{"version":1,"state":"running","written":"9999-12-31T23:59:59Z","rows":[` +
			listed(`{"rank":%d}`, 100_000) + "]}",
	} {
		add("status "+name, func(p *sandbox) {
			p.write("run/logs/status-0000.json", []byte(text))
			const at = "2026-11-22T11:58:00.000Z "
			p.write("run/logs/launcher.log", []byte(at+escape+"\n"+strings.Repeat(at+"x\n", 100_000)))
		}, watch)
	}
	add("many launchers", func(p *sandbox) {
		for i := range 20_000 {
			status := fmt.Appendf(nil, `{"version":1,"node_rank":%d,"host":"h%d"}`, i, i)
			p.write(fmt.Sprintf("run/logs/status-%05d.json", i), status)
			p.write(fmt.Sprintf("run/logs/launcher-%05d.log", i), []byte("2026-11-22T11:58:00.000Z x\n"))
		}
	}, watch, resume)
	for name, change := range map[string][2]string{
		"length":      {`"length": 4`, `"length": 4611686018427387904`},
		"bytes":       {`"bytes": `, `"bytes": 9`},
		"vocabulary":  {"vocab_size: 256", "vocab_size: 2147483647"},
		"hidden size": {"hidden_size: 16", "hidden_size: 2147483646"},
		"layers":      {"num_hidden_layers: 1", "num_hidden_layers: 65536"},
		"shape":       {"    256,\n", "    1099511627776,\n"},
		"name":        {"shard-00000-of", "../../../../outside/precious-of"},
		"absolute":    {"shard-00000-of", "/etc/passwd"},
		"escape":      {"model.norm.weight", `\u001b[2J\u009b\u202e`},
		"break":       {"model.norm.weight", `x\nFORGED`},
		"from":        {`from: null`, `from: ../../../outside`},
		"step":        {`"step": 2`, `"step": 9007199254740993`},
		"tokens":      {`"tokens": `, `"tokens": 99999999999`},
		"version":     {`"version": 2`, `"version": 99`},
		"cprun":       {`"cprun_version": "`, `"cprun_version": "\u001b[2J\u009b`},
		"format":      {`"cprun-checkpoint"`, `"\u001b[2J"`},
		"seeds":       {`"seeds": {`, `"seeds": {` + listed(`"%d":1`, 500_000) + ","},
		"extra":       {`"seeds": {`, `"extra": {` + listed(`"%d":1`, 1_500_000) + `}, "seeds": {`},
		"fields":      {`"param"`, strings.TrimSuffix(strings.Repeat(`"x",`, 1_000_000), ",")},
		"axes":        {`"shape": [`, `"shape": [` + strings.Repeat("1,", 1_000_000)},
		"config":      {`"config": "`, `"config": "` + strings.Repeat("x", 10<<20)},
	} {
		add("manifest "+name, func(p *sandbox) { // in both checkpoints, so that there is no fallback
			p.manifest(first, change[0], change[1], -1)
			p.manifest(second, change[0], change[1], -1)
		}, resume, export)
	}
	for name, header := range headers() {
		add("shard with header "+name, func(p *sandbox) {
			for _, dir := range []string{first, second} {
				p.raw("run/"+dir+"shard-00000-of-00002.safetensors", header.text(), header.data)
			}
		}, export)
	}
	add("a shard of holes", func(p *sandbox) { // sparse, with the length in the manifest
		for _, dir := range []string{first, second} {
			shard := p.path("run/" + dir + "shard-00000-of-00002.safetensors")
			size := must.Have(os.Stat(shard)).Size()
			p.manifest(dir, fmt.Sprintf(`"bytes": %d`, size), `"bytes": 1099511627776`, 1)
			p.must(os.Truncate(shard, 1<<40))
		}
	}, resume, export)
	add("many checkpoints", func(p *sandbox) {
		n := 2_000
		if *share == 1 {
			n = 10_000 // making and removing these takes longest
		}
		for i := range n {
			p.must(os.Mkdir(p.path(fmt.Sprintf("run/checkpoints/step-%08d", i+10)), 0o755))
		}
	}, resume, export)
	add("odd names", func(p *sandbox) {
		for _, name := range badNames {
			p.write("run/checkpoints/step-00000009.tmp-"+name[:min(len(name), 200)], nil)
			p.write("run/checkpoints/"+name, nil)
		}
	}, resume, export)
	add("nothing", func(p *sandbox) { p.must(os.RemoveAll(p.path("run"))) }, export)
	add("run is a link", func(p *sandbox) { // the user's own link, not one inside of a run directory
		p.must(os.Rename(p.path("run"), p.path("elsewhere")))
		p.must(os.Symlink("elsewhere", p.path("run")))
	}, resume, export)
	all[len(all)-1].good, all[len(all)-2].good = true, true
	for _, kind := range unreadable {
		if kind != "folder" && kind != "gone" && kind != "huge" {
			add("run is a "+kind, func(p *sandbox) {
				p.must(os.RemoveAll(p.path("run")))
				p.must(irregular[kind](p, p.path("run")))
			}, resume, export)
		}
	}
	sortInputs(all)
	return all
}
