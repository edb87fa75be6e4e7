package bench

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// packsFile writes a file of packs.
func packsFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "packs.json")
	if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

// Packs of documents are measured with each layout and algorithm. FLOPs count only visible pairs.
func TestPackedDocumentsAreMeasured(t *testing.T) {
	spec := &AttentionSpec{Algorithms: []string{"ring", "allgather"}, Layouts: []string{"document", "document-zigzag"},
		Backend: "flash",
		Heads:   4, KVHeads: 2, HeadDim: 16, Causal: true, Window: -1, PackCount: 2,
		Documents: packsFile(t, "[[40,3,21],[9,9,32,10],[1]]")}
	if err := spec.Load(); err != nil {
		t.Fatal(err)
	}
	spec.Default("cpu", 2)
	spec.DType = "fp32"
	if err := spec.Check(2); err != nil {
		t.Fatal(err)
	}
	if len(spec.Packs) != 2 {
		t.Fatalf("%d packs, want 2", len(spec.Packs))
	}
	rows := measure(t, 2, Task{Attention: spec}).Attention.Packed
	if len(rows) != 4 {
		t.Fatalf("%d rows, want 4", len(rows))
	}
	triangle := func(n int) int { return n * (n + 1) / 2 }
	first, second := triangle(40)+triangle(3)+triangle(21), 2*triangle(9)+triangle(32)+triangle(10)
	want := (FLOPs(first, 4, 16, 16) + FLOPs(second, 4, 16, 16)) / 2
	for _, r := range rows {
		if r.FLOPs != want || !(r.Forward.TFLOPs > 0) || !(r.Both.Seconds > 0) || !(r.UserSeconds >= 0) ||
			r.Imbalance < 1 || r.WorstImbalance < r.Imbalance ||
			r.Sent == 0 || r.Packs != 2 || r.Tokens != 64 || r.Iters != packIters || !(r.Dispatch > 0) {
			t.Errorf("row %+v; want %g FLOPs", r, want)
		}
	}
	if of := rows[0]; of.Layout != "document" || rows[3].Layout != "document-zigzag" || rows[1].Sent >= rows[3].Sent {
		t.Errorf("rows %+v", rows)
	}
}

func TestPacksAreChecked(t *testing.T) {
	for want, text := range map[string]string{
		"no pack":             "[]",
		"want magi or a JSON": "[3,4]",
		"document 1 has":      "[[3,0,4]]",
		"document 0 has -3":   "[[-3,4]]",
		"pack 2: its 3":       "[[9,9],[3]]",
		"unexpected end":      "[[3,",
	} {
		s := AttentionSpec{Documents: packsFile(t, text), PackCount: 20, Algorithms: []string{"ring"}, Causal: true,
			Window: -1}
		s.Default("cpu", 2)
		err := s.Load()
		if err == nil {
			err = s.Check(2)
		}
		if err == nil || !strings.Contains(err.Error(), "--documents") || !strings.Contains(err.Error(), want) {
			t.Errorf("packs %s: %v, want %q", text, err, want)
		}
	}
	for want, s := range map[string]AttentionSpec{
		"one --seq":    {Documents: MagiName, Seq: []int{1024, 2048}, PackCount: 1},
		"at least 512": {Documents: MagiName, Seq: []int{64}, PackCount: 1},
		"--packs -1":   {Documents: packsFile(t, "[[3,4]]"), PackCount: -1},
	} {
		if err := s.Load(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// The packs equal the output of scripts/oracle/packs.py, which uses numpy's default_rng(42).
func TestMagiPacksAreTheirs(t *testing.T) {
	got, err := MagiPacks(16384, 3)
	if err != nil {
		t.Fatal(err)
	}
	want := [][]int{
		{216, 1536, 1536, 762, 350, 75, 75, 150, 350, 150, 75, 30, 3072, 30, 4096, 3881},
		{326, 1536, 1536, 350, 762, 762, 350, 350, 350, 1536, 350, 2048, 3072, 30, 350, 762, 1914},
		{792, 1536, 5, 150, 75, 1536, 4096, 4096, 150, 3948},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("packs of 16384 tokens: %v, want %v", got, want)
	}
}

func TestMagiPacksRefuseOddLengths(t *testing.T) {
	for _, tokens := range []int{0, 2, 10, -4} {
		if p, err := MagiPacks(tokens, 1); err == nil {
			t.Errorf("packs of %d tokens: %v, want an error", tokens, p)
		}
	}
}
