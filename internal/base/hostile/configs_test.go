package hostile

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// escape must never appear in the output: it moves the cursor and sets the title, in both forms of the sequences.
const escape = "\x1b[2J\x1b]0;title\x07\u009b31m\u202e"

// yaml is a config that trains within a moment, with its data in the same directory.
const yaml = `model: {vocab_size: 256, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, ` +
	`num_attention_heads: 2, num_key_value_heads: 1}
data: {path: text.txt, tokenizer: bytes, seq_len: 64}
train: {steps: 2, deterministic: true}
lr_schedule: {name: constant}
checkpoint: {every: 1}
`

// small writes the config and its data, and returns the config's path.
func (p *sandbox) small() string {
	p.write("text.txt", bytes.Repeat([]byte("all that is solid melts into air. "), 40))
	return p.write("train.yaml", []byte(yaml))
}

// irregular makes the kinds of names that are not readable files.
var irregular = map[string]func(p *sandbox, path string) error{
	"pipe":   func(_ *sandbox, path string) error { return unix.Mkfifo(path, 0o644) },
	"folder": func(_ *sandbox, path string) error { return os.Mkdir(path, 0o755) },
	"zero":   func(_ *sandbox, path string) error { return os.Symlink("/dev/zero", path) },
	"tty":    func(_ *sandbox, path string) error { return os.Symlink("/dev/tty", path) },
	"loop":   func(_ *sandbox, path string) error { return os.Symlink(path, path) },
	"gone":   func(_ *sandbox, path string) error { return os.Symlink("gone", path) },
	"socket": func(_ *sandbox, path string) error {
		dir, err := os.Open(filepath.Dir(path)) // the full path may be too long for a socket address
		if err != nil {
			return err
		}
		defer dir.Close()
		short := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
		if err == nil {
			l.SetUnlinkOnClose(false)
			err = l.Close()
		}
		if err == nil {
			err = os.Chmod(path, 0o755)
		}
		return err
	},
	"huge": func(_ *sandbox, path string) error { // a sparse terabyte
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644)
		if err == nil {
			err = f.Truncate(1 << 40)
			f.Close()
		}
		return err
	},
	"link":   func(p *sandbox, path string) error { return os.Symlink(filepath.Join(p.outside, "precious"), path) },
	"target": func(p *sandbox, path string) error { return os.Symlink(filepath.Join(p.outside, "new"), path) },
	"hard":   func(p *sandbox, path string) error { return os.Link(filepath.Join(p.outside, "precious"), path) },
	"away":   func(p *sandbox, path string) error { return os.Symlink(filepath.Join(p.outside, "folder"), path) },
}

// unreadable lists the kinds that cprun rejects as any file.
var unreadable = []string{"pipe", "folder", "zero", "tty", "loop", "gone", "socket", "huge"}

// configs returns hostile texts of a train.yaml.
func configs() (all []input) {
	texts := map[string][]byte{
		"empty": nil, "nul": make([]byte, 100), "bom": []byte("\xef\xbb\xbfmodel: 1"), "utf16": []byte("\xff\xfem\x00o\x00"),
		"latin1":       []byte("model: \xe4\n"),
		"binary":       {0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0xff, 0xfe, 0x80},
		"escape":       []byte("model: \"" + escape + "\"\n"),
		"escape key":   []byte("\"" + `\e[2J` + "\": 1\n"),
		"escape value": []byte("data: {path: \"\\e[31m\\x9b2J\\u202e\"}\n"),
		"break":        []byte("data: {path: \"x\\nFORGED done\"}\n"),
		"break key":    []byte("\"x\\nFORGED done\": 1\n"),
		"deep list":    bytes.Repeat([]byte("["), 500_000),
		"deep map":     bytes.Repeat([]byte("{a: "), 200_000),
		"deep block":   []byte(deepBlock(9000)),
		"deep dashes":  bytes.Repeat([]byte("- "), 400_000),
		"laughs":       []byte(laughs()),
		"recursive":    []byte("a: &a [*a, *a]\nmodel: *a\n"),
		"merge":        []byte("a: &a {b: 1}\nmodel: {<<: [*a, *a, *a]}\n"),
		"tags":         []byte("model: !!python/object/apply:os.system [id]\n"),
		"many tags":    bytes.Repeat([]byte("- !a b\n"), 100_000),
		"anchors":      bytes.Repeat([]byte("- &a b\n"), 100_000),
		"aliases":      append([]byte("- &a b\n"), bytes.Repeat([]byte("- *a\n"), 150_000)...),
		"documents":    bytes.Repeat([]byte("---\na: 1\n"), 100_000),
		"too long":     bytes.Repeat([]byte("# x\n"), 1<<19),
		"comments":     bytes.Repeat([]byte("#\n"), 500_000),
		"long key":     append(bytes.Repeat([]byte("k"), 1_000_000), []byte(": 1\n")...),
		"long value":   append([]byte("data: {path: "), append(bytes.Repeat([]byte("v"), 1_000_000), '}')...),
		"long number":  append([]byte("train: {steps: "), append(bytes.Repeat([]byte("9"), 1_000_000), '}')...),
		"same keys":    bytes.Repeat([]byte("model: 1\n"), 100_000),
		"nested keys":  []byte(strings.Repeat("model:\n", 1) + strings.Repeat("  vocab_size: 1\n", 60_000)),
		"odd keys":     []byte(numbered("k%d: 1\n", 80_000)),
		"near keys":    []byte("train:\n" + numbered("  step%d: 1\n", 60_000)),
		"complex keys": bytes.Repeat([]byte("? [a, b]\n: c\n"), 60_000),
		"quotes":       bytes.Repeat([]byte("'"), 900_001),
		"block scalar": append([]byte("a: |999999999\n"), bytes.Repeat([]byte(" x\n"), 1000)...),
		"tabs":         bytes.Repeat([]byte("\t"), 900_000),
		"directives":   bytes.Repeat([]byte("%YAML 1.1\n"), 90_000),
		"long layers":  []byte("model: {layer_types: [" + strings.Repeat("x, ", 300_000) + "]}\n"),
	}
	add := func(name, says string, make func(p *sandbox) []string) {
		all = append(all, input{kind: "config", name: name, says: []string{says}, make: make})
	}
	for name, text := range texts {
		for _, command := range [][]string{{"plan"}, {"--run-dir", "run"}, {"scale"}} {
			add(command[0]+" "+name, "train.yaml", func(p *sandbox) []string {
				return append(command, p.write("train.yaml", text))
			})
		}
	}
	for _, kind := range unreadable {
		for _, command := range [][]string{{"plan"}, {"--run-dir", "run"}, {"bench", "train"}, {"scale"}} {
			add(command[0]+" of a "+kind, "bad.yaml", func(p *sandbox) []string {
				p.must(irregular[kind](p, p.path("bad.yaml")))
				return append(command, "bad.yaml")
			})
		}
	}
	for name, text := range experiments() {
		says := "grid.yaml"
		if name == "device" {
			says = "/dev/zero"
		}
		add("experiment with "+name, says, func(p *sandbox) []string {
			p.small()
			return []string{"scale", p.write("grid.yaml", []byte(text))}
		})
	}
	sortInputs(all)
	return all
}

// experiments returns hostile texts of an experiment with a valid config.
func experiments() map[string]string {
	return map[string]string{
		"many cells": "base: train.yaml\ngrid:\n" + numbered("  model.m%d: [1, 2]\n", 10) +
			"  data.seq_len: [" + numbered("%d, ", 20_000) + "1]\n",
		"many axes": "base: train.yaml\ngrid:\n" + numbered("  k%d: [1]\n", 50_000),
		"many values": "base: train.yaml\ngrid: {parallel.algorithm: [" +
			strings.Repeat("rign, ", 100_000) + "x]}\n",
		"many settings":   "base: train.yaml\nset:\n" + numbered("  k%d: 1\n", 50_000) + "grid: {nproc: [1]}\n",
		"deep conditions": "base: train.yaml\ngrid: {nproc: [1]}\nskip: ['" + strings.Repeat("(", 400_000) + "']\n",
		"many conditions": "base: train.yaml\ngrid: {nproc: [1]}\nskip: [" +
			strings.Repeat("'nproc == ', ", 50_000) + "'']\n",
		"escape":        "base: \"\\e[2J\"\ngrid: {nproc: [\"\\e[31m\"], \"\\e[2Jx\": [1]}\nskip: [\"\\e[2J == '\\u202e\"]\n",
		"break":         "base: \"x\\nFORGED done\"\ngrid: {\"x\\nFORGED done\": [1]}\n",
		"itself":        "base: grid.yaml\ngrid: {nproc: [1]}\n",
		"device":        "base: /dev/zero\ngrid: {nproc: [1]}\n",
		"cells outside": "base: train.yaml\ngrid: {data.cache: [../../outside, /]}\nwarmup: 100\n",
	}
}

// numbered returns n numbered lines.
func numbered(format string, n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, format, i)
	}
	return b.String()
}

// listed returns n numbered texts with commas between.
func listed(format string, n int) string { return strings.TrimSuffix(numbered(format+",", n), ",") }

// deepBlock returns nested mappings, each indented by one more space.
func deepBlock(n int) string {
	var b strings.Builder
	for i := range min(n, 1300) { // more would make the file too long
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

// laughs returns a billion laughs attack.
func laughs() string {
	var b strings.Builder
	b.WriteString("a0: &a0 [x, x, x, x, x, x, x, x, x]\n")
	for i := range 12 {
		fmt.Fprintf(&b, "a%d: &a%d [%s*a%d]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*a%d, ", i), 8), i)
	}
	return b.String() + "model: *a12\n"
}

// values lists values that no config key accepts.
var values = []string{
	"9223372036854775807", "-9223372036854775808", "18446744073709551616", "99999999999999999999999999", "1e400", "-1",
	".nan", ".inf", "0x7fffffffffffffff",
	"2147483647", "1125899906842624T", "[]", "{}", "[[[[1]]]]", "null", `"` + `\e[31m\x9b` + `"`, `"\nFORGED"`, "~",
	"!!binary aGk=", "*a",
}

// keys returns configs with a hostile value of one key.
func keys() (all []input) {
	for _, key := range []string{
		"model.vocab_size", "model.hidden_size", "model.intermediate_size", "model.num_hidden_layers",
		"model.num_attention_heads", "model.head_dim", "model.rope_theta",
		"model.rope_scaling", "model.sliding_window", "model.layer_types", "model.max_position_embeddings", "data.seq_len",
		"data.path", "data.eos_token_id", "data.validation",
		"train.steps", "train.global_batch_size", "train.micro_batch_size", "optimizer.betas", "optimizer.lr",
		"parallel.context", "parallel.layout",
		"memory.loss_chunk", "checkpoint.every", "log.prometheus", "log.trace_steps", "model.from",
	} {
		for _, value := range values {
			all = append(all, input{kind: "key", name: key + "=" + value, fail: true, make: func(p *sandbox) []string {
				return []string{"plan", "--json", "--nproc", "4", "--set", key + "=" + value, p.small()}
			}})
		}
	}
	return all
}
