package main

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

const bench3B = "../../examples/bench/llama-3.2-3b-128k.yaml"

// The longest sequence fits, and the next longer one does not.
func TestPlanLongest(t *testing.T) {
	t.Parallel()
	args := []string{bench3B, "--set", "model.num_hidden_layers=4", // fewer are planned sooner
		"--assume", "gpu=h200,gpus=4,hosts=2,net=50G,cudnn=9.19.0"}
	run := func(more ...string) planned { return plan(t, append(args, more...)...) }
	longest := run("--longest")
	if !longest.Memory.Fits || longest.Partition.Ranks != 8 || longest.Partition.SeqLen%1024 != 0 ||
		longest.Partition.SeqLen < 1<<20 {
		t.Fatalf("%+v", longest)
	}
	next := fmt.Sprintf("data.seq_len=%d", longest.Partition.SeqLen+1024)
	if run("--set", next).Memory.Fits {
		t.Errorf("%s fits, and %d are the most", next, longest.Partition.SeqLen)
	}
	if m := longest.Memory; m.Reserve != m.Device*3/100 || m.Total > m.Device-m.Reserve || m.Total < m.Device*95/100 {
		t.Errorf("the longest leaves another part free than 3 %%: %+v", m)
	}
	if whole := run("--longest", "--set", "memory.reserve=0"); whole.Memory.Reserve != 0 ||
		whole.Partition.SeqLen <= longest.Partition.SeqLen {
		t.Errorf("without a reserve: %+v", whole)
	}
	out, _ := must(t, append([]string{"plan", "--longest"}, args...)...)
	text, _, _ := strings.Cut(out, "\n\n")
	contains(t, "the plan", strings.Join(strings.Fields(text), " "), "The bound is device memory: activations",
		"Twice as many tokens fit 16 ranks on 4 hosts", "ram=) does not lift it")
	if !strings.HasPrefix(text, "longest") || !strings.Contains(text, "memory.reserve") ||
		strings.Contains(text, "largest item") {
		t.Errorf("the plan of the longest begins with\n%s", text)
	}
}

// If host memory is short, more of it lifts the longest sequence, up to the device's bound.
func TestPlanLongestOnLittleHostMemory(t *testing.T) {
	t.Parallel()
	out, _ := must(t, "plan", bench3B, "--set", "model.num_hidden_layers=8", "--assume",
		"gpu=h200,gpus=2,cudnn=9.19.0,ram=20G", "--longest")
	text, _, _ := strings.Cut(out, "\n\n")
	contains(t, "the plan", strings.Join(strings.Fields(text), " "), "20 GiB (--assume ram=) lifts it")
}

// fitsTerminal fails if a text is longer or wider than a terminal.
func fitsTerminal(t *testing.T, text string) {
	t.Helper()
	if n := strings.Count(text, "\n"); n > 40 {
		t.Errorf("%d lines\n%s", n, text)
	}
	for line := range strings.Lines(text) {
		if utf8.RuneCountInString(line) > 81 {
			t.Errorf("a line of %d columns: %s", utf8.RuneCountInString(line), line)
		}
	}
}

// The first lines report whether the run fits. The short plan fits a terminal, and --verbose prints the rest.
func TestPlanBeginsWithItsVerdict(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args    []string
		verdict string
	}{
		{[]string{"../../examples/opticks.yaml", "--nproc", "4"}, "fits"},
		{[]string{bench3B, "--assume", "gpu=h200,gpus=8,hosts=16,net=50G,cudnn=9.19.0"}, "fits"},
		{[]string{bench3B, "--assume", "gpu=h200,gpus=8,cudnn=9.19.0,memory=20G", "--set", "memory.recompute=none",
			"--set", "memory.offload=off"}, "does NOT fit"},
		{[]string{bench3B, "--assume", "arch=sm90,gpus=2"}, "memory unknown"},
		{[]string{"../../examples/documents.yaml", "--nproc", "3"}, "fits"},
	} {
		short, _ := must(t, append([]string{"plan"}, c.args...)...)
		long, _ := must(t, append([]string{"plan", "--verbose"}, c.args...)...)
		first, rest, _ := strings.Cut(short, "\n\n")
		if !strings.HasPrefix(first, c.verdict) || !strings.Contains(first, " step") ||
			!strings.Contains(rest, "\nbackend ") {
			t.Errorf("%v begins with\n%s", c.args, short)
		}
		fitsTerminal(t, short)
		for _, w := range []string{"\nconfig ", "global_batch_size:", "\npartition ", "\nhops ", "rank 1 "} {
			if strings.Contains(short, w) || !strings.Contains(long, w) {
				t.Errorf("%v: %q in short %t, in long %t", c.args, w, strings.Contains(short, w),
					strings.Contains(long, w))
			}
		}
	}
}

// A plan lists hops for each pair of ranks that share a sequence, so their number is limited.
func TestPlanBoundsItsRanks(t *testing.T) {
	t.Parallel()
	for args, want := range map[string][]string{
		"--nproc 4096":                       {"parallel.context", "1024"},
		"--assume gpu=h200,gpus=8,hosts=512": {"parallel.context", "1024"},
		"--nproc 512 --set model.num_attention_heads=512 --set model.num_key_value_heads=512 --set " +
			"parallel.algorithm=ulysses": {"parallel.algorithm", "256"},
	} {
		invalid(t, strings.Fields("plan "+bench3B+" "+args), want...)
	}
	must(t, "plan", bench3B, "--nproc", "4096", "--set", "parallel.context=8", "--set", "train.global_batch_size=512")
}

func TestPlansOfManyCheckTheirFlags(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"--assume arch=sm90 --longest":                      "gpu=h200",
		"--assume gpu=h200 --longest --set data.seq_len=1K": "leave --set",
		"--assume gpu=h200,memory=16M --longest":            "not even",
	} {
		invalid(t, strings.Fields("plan "+bench3B+" "+args), want)
	}
}
