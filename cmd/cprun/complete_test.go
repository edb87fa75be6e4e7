package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Shells complete commands, values of flags, and keys of --set.
func TestCompletion(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		want []string // expected among the answers
		only bool     // no other answers
	}{
		{[]string{"c"}, []string{"completion"}, false},
		{[]string{"--device", ""}, []string{"auto", "cpu", "cuda"}, true},
		{[]string{"generate", "--device", ""}, []string{"auto", "cpu", "cuda"}, true},
		{[]string{"attention", "--layout", ""}, []string{"zigzag", "striped", "contiguous", "window", "document",
			"document-zigzag", "auto"}, true},
		{[]string{"attention", "--algorithm", ""}, []string{"ring", "allgather", "ulysses", "hierarchical", "auto"},
			true},
		{[]string{"bench", "attention", "--backend", ""}, []string{"flash", "fused", "reference", "auto"}, true},
		{[]string{"bench", "attention", "--gather", ""}, []string{"auto"}, false},
		{[]string{"bench", "comm", "--calls", ""}, []string{"exchange"}, false},
		{[]string{"--log-level", ""}, []string{"error", "warn", "info", "debug"}, true},
		{[]string{"--set", "train.st"}, []string{"train.steps="}, true},
		{[]string{"plan", "--set", "checkpoint."}, []string{"checkpoint.every=", "checkpoint.keep="}, false},
		{[]string{"plan", ""}, []string{"yaml", "yml"}, true}, // file extensions
		{[]string{"report", ""}, nil, true},                   // directories
	} {
		out, _ := must(t, append([]string{"__completeNoDesc"}, c.args...)...)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		got := lines[:len(lines)-1] // the last line is a directive for the shell
		for _, w := range c.want {
			if !slices.Contains(got, w) {
				t.Errorf("%q: %q lacks %s", c.args, got, w)
			}
		}
		if c.only && len(got) != len(c.want) {
			t.Errorf("%q: %q, want %q", c.args, got, c.want)
		}
	}
	for shell, want := range map[string]string{"bash": "complete -o", "zsh": "#compdef cprun",
		"fish": "complete -c cprun", "powershell": "Register-ArgumentCompleter"} {
		if out, _ := must(t, "completion", shell); !strings.Contains(out, want) {
			t.Errorf("completion %s lacks %q", shell, want)
		}
	}
	for _, args := range [][]string{{"completion"}, {"completion", "tcsh"}} {
		if code, stdout, stderr := cprun(t, args...); code != 2 || stdout != "" || !strings.Contains(stderr, "zsh") {
			t.Errorf("%v: exit status %d\n%s%s", args, code, stdout, stderr)
		}
	}
	if help, _ := must(t, "-h"); !strings.Contains(help, "\n  completion ") {
		t.Error("the help does not list completion")
	}
}

// The help of a flag names each word of its completion.
func TestCompletedWordsAreInTheHelp(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			complete, ok := c.GetFlagCompletionFunc(f.Name)
			if !ok || f.Name == "set" {
				return
			}
			list, _ := complete(c, nil, "")
			for _, w := range list {
				seen[f.Name] = true
				if f.Name != "calls" && !strings.Contains(f.Usage, w) { // listed in its default
					t.Errorf("%s --%s completes %s, and its help is %q", c.CommandPath(), f.Name, w, f.Usage)
				}
			}
		})
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(rootCommand())
	for name := range words {
		if !seen[name] {
			t.Errorf("no command has a flag --%s", name)
		}
	}
}
