package command

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model/machine"
)

// A prefix ends inside the first document, or with a document.
func TestPrefixes(t *testing.T) {
	for _, c := range []struct {
		docs   []int
		length int
		want   []int // the last ones
	}{
		{nil, 6400, []int{6200, 6300}}, {[]int{4, 7, 5}, 16, []int{1, 2, 3, 4, 11}}, {[]int{3}, 3, []int{1, 2}},
	} {
		got := prefixes(c.docs, c.length)
		if n := len(got) - len(c.want); n < 0 || !slices.Equal(got[n:], c.want) || !slices.IsSorted(got) {
			t.Errorf("%v of %d: %v, want %v last", c.docs, c.length, got, c.want)
		}
	}
}

// If one rank lacks memory, it recomputes and offloads; then both sides take the longest prefix that fits.
func TestVerifyShortens(t *testing.T) {
	path := filepath.Join(t.TempDir(), "train.yaml")
	text := must.Have(filepath.Abs("../../../examples/data/opticks-books-1-2.txt"))
	yaml := fmt.Sprintf("model: {vocab_size: 256, hidden_size: 64, intermediate_size: 512, num_hidden_layers: 2, "+
		"num_attention_heads: 2}\ndata: {path: %s, seq_len: 64K}\ntrain: {steps: 1}\noptimizer: {lr: 1.0e-3}\n"+
		"memory: {recompute: none, offload: off}\n", text)
	must.Do(t, os.WriteFile(path, []byte(yaml), 0o666))
	o := VerifyOptions{Options: Options{machine: machine.CPU()}}
	load := func(memory int64) (one, many verified, err error) {
		o.machine.Memory = 0
		if many, err = o.load(path, 2); err == nil {
			o.machine.Memory = memory
			one, err = o.load(path, 1, alone...)
		}
		if err == nil {
			one, many, err = o.shorten(path, one, many)
		}
		return one, many, err
	}
	lengths := map[string]int{}
	for name, memory := range map[string]int64{"ample": 4 << 30, "little": 1 << 30, "less": 200 << 20} {
		one, many, err := load(memory)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if lengths[name] = one.cfg.Data.SeqLen; many.cfg.Data.SeqLen != lengths[name] || !one.memory.Fits {
			t.Errorf("%s: %d and %d tokens", name, one.cfg.Data.SeqLen, many.cfg.Data.SeqLen)
		}
		if saves := one.cfg.Memory.Recompute == "full"; saves != (name != "ample") {
			t.Errorf("%s: recompute %s", name, one.cfg.Memory.Recompute)
		}
	}
	if lengths["ample"] != 64<<10 || lengths["little"] != 64<<10 || lengths["less"] >= 64<<10 || lengths["less"] < 1<<10 {
		t.Errorf("tokens: %v", lengths)
	}
	if _, _, err := load(1 << 20); err == nil || !strings.Contains(err.Error(), "not even the memory for") {
		t.Errorf("with too little memory: %v", err)
	}
}
