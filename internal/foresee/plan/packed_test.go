package plan

import (
	"strings"
	"testing"
)

// The text draws the work of each rank of a packed sample; the work adds up.
func TestPackedSampleIsDrawn(t *testing.T) {
	cfg := load(t, 4, "data.pack_documents=true", "parallel.layout=document", "data.seq_len=1000")
	docs := []int{500, 3, 17, 80, 400}
	p, err := Make(cfg, 4, Options{Docs: docs})
	if err != nil {
		t.Fatal(err)
	}
	tokens, pairs, want := 0, 0, 0
	for _, n := range docs {
		want += n * (n + 1) / 2
	}
	for _, r := range p.Packed.PerRank {
		tokens, pairs = tokens+r.Tokens, pairs+r.Pairs
		if r.Tokens != 250 || r.SendBytes <= 0 {
			t.Errorf("rank %d: %+v", r.Rank, r)
		}
	}
	if tokens != 1000 || pairs != want || p.Packed.Imbalance < 1 || p.Packed.Imbalance > 1.1 {
		t.Errorf("%d tokens, %d pairs, want 1000 and %d; imbalance %v", tokens, pairs, want, p.Packed.Imbalance)
	}
	var b strings.Builder
	if err := written(&b, p); err != nil {
		t.Fatal(err)
	}
	if s := b.String(); !strings.Contains(s, "5 documents of 3 to 500 tokens") || strings.Count(s, " parts") < 3 {
		t.Errorf("the plan says\n%s", s)
	}
	if p, err = Make(cfg, 4, Options{}); err != nil || p.Packed != nil {
		t.Errorf("without data: %+v, %v", p.Packed, err)
	}
	if _, err := Make(cfg, 4, Options{Docs: []int{999}}); err == nil {
		t.Error("documents that do not fill a sample were drawn")
	}
}
