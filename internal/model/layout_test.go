package model

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/hf"
)

var update = flag.Bool("update", false, "write the golden files")

// Checkpoints hold flat buffers, so the order of parameters and the ends of buckets must never change.
func TestLayoutsStayThoseOfOldCheckpoints(t *testing.T) {
	var out strings.Builder
	for _, family := range hf.Families() {
		cfg := &hf.Config{Architecture: family, VocabSize: 70, HiddenSize: 32, IntermediateSize: 40, NumHiddenLayers: 2,
			NumAttentionHeads: 4, NumKeyValueHeads: 2, HeadDim: 8, AttentionBias: true, MLPBias: true,
			NumExperts: 4, NumExpertsPerTok: 2, MoEIntermediateSize: 12, NSharedExperts: 1,
			TieWordEmbeddings: family != hf.Llama}
		if f := cfg.Family(); f.Interval > 0 {
			cfg.LayerTypes = []string{hf.LinearAttention, hf.FullAttention}
			cfg.LinearNumKeyHeads, cfg.LinearNumValueHeads, cfg.LinearConvKernelDim = 2, 4, 4
			cfg.LinearKeyHeadDim, cfg.LinearValueHeadDim = 8, 6
			if f.Experts != nil {
				cfg.NSharedExperts, cfg.SharedExpertIntermediateSize = 0, 10
			}
		}
		list := func(what string, l *FlatLayout) {
			fmt.Fprintf(&out, "%s: %s\n", family, what)
			for b, bucket := range l.Buckets {
				fmt.Fprintf(&out, "  bucket %d: %d to %d\n", b, bucket.Lo, bucket.Hi)
				for i, p := range l.Params {
					if l.Of(i) == b {
						fmt.Fprintf(&out, "    %d %s %v product %t mean %g bound %.3g\n", p.Offset, p.Name, p.Shape, p.Product,
							p.Mean, p.Bound)
					}
				}
			}
		}
		list("3 ranks", NewLayout(cfg, 3))
		if slices.Contains([]string{hf.Llama, hf.Gemma3, "phi3"}, family) {
			cfg.Tuning = lora(0)
			l := NewLayout(cfg, 1)
			list("adapters", l)
			list("frozen", l.Frozen)
		}
	}
	const golden = "testdata/layouts.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(want), "\n")
	for i, line := range strings.Split(out.String(), "\n") {
		if i >= len(lines) || line != lines[i] {
			t.Fatalf("line %d of the layouts is %q, want %q", i+1, line, lines[min(i, len(lines)-1)])
		}
	}
}
