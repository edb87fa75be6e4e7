package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/cprun/cprun/internal/model/machine"
)

// generated returns the text of a model, and fails if --quiet prints anything.
func generated(t *testing.T, args ...string) string {
	t.Helper()
	out, said := must(t, append([]string{"generate", "--quiet"}, args...)...)
	if said != "" {
		t.Errorf("generate --quiet %v says\n%s", args, said)
	}
	if !utf8.ValidString(out) {
		t.Errorf("generate %v writes %q", args, out)
	}
	return out
}

// Matrices that a family joins in files are read from there.
func TestGenerateFromJoinedMatrices(t *testing.T) {
	t.Parallel()
	hf := filepath.Join(t.TempDir(), "hf")
	dir, _ := trains(t, "--set", "model.architecture=phi3", small(t, 4))
	must(t, "export", dir, "--to", hf, "--dtype", "fp32")
	want := generated(t, dir, "--prompt", "Four score", "--max-tokens", "20")
	if got := generated(t, hf, "--prompt", "Four score", "--max-tokens", "20"); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// A run, its export and the checkpoint of a step generate the same text for each source of the prompt.
func TestGenerate(t *testing.T) {
	t.Parallel()
	_, dir := trained(t)
	hf := filepath.Join(t.TempDir(), "hf")
	must(t, "export", dir, "--to", hf)
	want := generated(t, dir, "--prompt", "Four score", "--max-tokens", "60")
	if n := utf8.RuneCountInString(want); n < 10 || n > 60 {
		t.Errorf("60 tokens of a byte each are %d characters: %q", n, want)
	}
	file := write(t, t.TempDir(), "prompt", "Four score\n")
	for _, args := range [][]string{
		{dir, "--prompt", "Four score"}, {hf, "--prompt", "Four score"}, {dir, "--prompt-file", file},
		{filepath.Join(dir, "checkpoints", "latest"), "--prompt", "Four score"},
		{dir, "--prompt", "Four score", "--step", "4"},
	} {
		if got := generated(t, append(args, "--max-tokens", "60")...); got != want {
			t.Errorf("%v: %q, want %q", args, got, want)
		}
	}
	c := process(t, "generate", dir, "--prompt", "-", "--max-tokens", "60", "--echo")
	c.Stdin = strings.NewReader("Four score\n")
	var said strings.Builder
	c.Stderr = &said
	if got, err := c.Output(); err != nil || string(got) != "Four score"+want {
		t.Errorf("from standard input: %q, %v; want %q", got, err, want)
	}
	contains(t, "generate", said.String(), "; text: 60 tokens in ")
	for _, args := range [][]string{{"--seed", "2"}, {"--temperature", "0"}, {"--top-k", "1"}, {"--step", "2"},
		{"--top-p", "0.01"}} {
		if got := generated(t, append([]string{dir, "--prompt", "Four score", "--max-tokens", "60"},
			args...)...); got == want {
			t.Errorf("%v changes nothing", args)
		}
	}
	if a, b := generated(t, dir, "--prompt", "x", "--temperature", "0"),
		generated(t, dir, "--prompt", "x", "--top-k", "1"); a == "" || a[0] != b[0] {
		t.Errorf("the likeliest token: %q, and %q", a, b)
	}
	if got := generated(t, dir, "--prompt", "Four score", "--max-tokens", "60", "--device", "cpu"); !machine.Built &&
		got != want {
		t.Errorf("on the CPU: %q, want %q", got, want)
	}
	_, why := must(t, "generate", hf, "--prompt", strings.Repeat("a", 190), "--max-tokens", "60")
	contains(t, "at the end of the positions", why, "text: 10 tokens", "200")
}

func TestGenerateRefuses(t *testing.T) {
	t.Parallel()
	config, dir := trained(t)
	hf := filepath.Join(t.TempDir(), "hf")
	must(t, "export", dir, "--to", hf)
	if err := os.Remove(filepath.Join(hf, "tokenizer.json")); err != nil {
		t.Fatal(err)
	}
	ids := filepath.Join(t.TempDir(), "ids")
	must(t, "tokenize", "--tokenizer", "bytes", "--to", ids, "../../examples/data/gettysburg.txt")
	ofTokens, _ := trains(t, "--set", "data.path="+ids+".bin", "--set", "train.steps=1", config)
	notUTF8 := write(t, t.TempDir(), "latin1", "caf\xe9")
	words := model(t, "gpt2")
	for _, c := range [][]string{
		{"--prompt is missing", dir},
		{"--prompt-file", dir, "--prompt", "a", "--prompt-file", notUTF8},
		{"/nope: no such file", dir, "--prompt-file", "/nope"},
		{"--max-tokens 0", dir, "--prompt", "a", "--max-tokens", "0"},
		{"--top-p 1.5", dir, "--prompt", "a", "--top-p", "1.5"},
		{"--step -1", dir, "--prompt", "a", "--step", "-1"},
		{"no checkpoint of step 3; there are those of 2, 4", dir, "--prompt", "a", "--step", "3"},
		{"name a run directory", t.TempDir(), "--prompt", "a"},
		{"name a run directory", "/nope", "--prompt", "a"},
		{"the prompt is empty", dir, "--prompt", ""},
		{"200 tokens", dir, "--prompt", strings.Repeat("a", 200)},
		{filepath.Join(hf, "tokenizer.json"), hf, "--prompt", "a"},
		{"--tokenizer", ofTokens, "--prompt", "a"},
		{"vocab_size is 256: it is another model's; --tokenizer names", words, "--prompt", "a"},
		{"not UTF-8 at byte 3; convert it", fitting(t), "--prompt-file", notUTF8},
		{"--device \"gpu\": want auto, cpu or cuda", dir, "--prompt", "a", "--device", "gpu"},
	} {
		code, out, said := cprun(t, append([]string{"generate"}, c[1:]...)...)
		if code != 2 || out != "" || strings.Count(said, "\n") != 1 || !strings.Contains(said, c[0]) {
			t.Errorf("generate %v: status %d, %q\n%s\nwant %q", c[1:], code, out, said, c[0])
		}
	}
	for _, d := range []string{ofTokens, hf} {
		if generated(t, d, "--prompt", "a", "--tokenizer", "bytes", "--max-tokens", "20") == "" {
			t.Errorf("%s writes nothing with the tokenizer that is named", d)
		}
	}
}

// A text ends at every id in generation_config.json.
func TestGenerateEndsWithTheText(t *testing.T) {
	t.Parallel()
	dir := fitting(t)
	var all []string
	for id := range 256 {
		all = append(all, fmt.Sprint(id))
	}
	write(t, dir, "generation_config.json", `{"eos_token_id": [`+strings.Join(all, ",")+`]}`)
	out, said := must(t, "generate", dir, "--prompt", "a", "--max-tokens", "20")
	if out != "" {
		t.Errorf("all tokens end a text: %q", out)
	}
	contains(t, "generate", said, "text: 0 tokens", "the model ended the text")
	for _, prompt := range []string{"a", "a\n"} {
		both, err := process(t, "generate", dir, "--prompt", prompt, "--echo").CombinedOutput()
		if err != nil || !strings.HasPrefix(string(both), "a\ncprun: prompt: ") {
			t.Errorf("statistics do not have a line of their own: %q, %v", both, err)
		}
	}
	for _, prompt := range []string{"a", ""} { // "": only the token that begins a text
		if generated(t, dir, "--prompt", prompt, "--max-tokens", "20", "--ignore-eos") == "" {
			t.Errorf("--ignore-eos writes nothing after %q", prompt)
		}
	}
}

// Ctrl-C ends a text cleanly, and prints its statistics.
func TestGenerateIsInterrupted(t *testing.T) {
	t.Parallel()
	dir, _ := trains(t, "--set", "model.max_position_embeddings=200000", small(t, 1))
	c := process(t, "generate", dir, "--prompt", "Four", "--max-tokens", "150000")
	var said bytes.Buffer
	c.Stderr = &said
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 20)); err != nil {
		t.Fatal(err)
	}
	signal(t, syscall.SIGINT, c.Process.Pid)
	rest, err := io.ReadAll(out)
	if err != nil || !utf8.Valid(bytes.TrimLeftFunc(rest, func(r rune) bool { return r == utf8.RuneError })) {
		t.Errorf("%d bytes more, %v", len(rest), err)
	}
	c.Wait() // the error is the status
	if code := c.ProcessState.ExitCode(); code != 130 || !strings.Contains(said.String(), "; interrupted") {
		t.Errorf("status %d, it says\n%s", code, said.String())
	}
}
