package train_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/tensor"
)

// Packed documents in the document layout train like those in other layouts, with every algorithm, layers of several
// windows, and documents of one token.
func TestDocumentLayoutsTrainAlike(t *testing.T) {
	t.Parallel()
	for i, mode := range [][]string{
		{"data.seq_len=61"},
		{"data.seq_len=61", "model.sliding_window=4", "model.layer_types=[sliding_attention, full_attention]",
			"memory.recompute=full"},
	} {
		mode = append(mode, "data.pack_documents=true", "train.micro_batch_size=2", "train.global_batch_size=2")
		want := curve(t, tiny, 1, mode...)
		for _, ranks := range []int{3, 4} {
			for a, algorithm := range []string{"ring", "allgather"} {
				if testing.Short() && (i+a+ranks)%2 == 0 {
					continue // one number of ranks for each, in turn
				}
				of := map[string]metrics.Step{}
				for _, layout := range []string{"document", "document-zigzag", "contiguous"} {
					got := curve(t, tiny, ranks, append(mode, "parallel.layout="+layout, "parallel.algorithm="+algorithm)...)
					closeTo(t, fmt.Sprintf("%v, %d ranks, %s, %s", mode, ranks, layout, algorithm), got, want, 2e-5)
					of[layout] = got[0]
				}
				if d, c := of["document"], of["contiguous"]; !(d.AttentionImbalance >= 1 &&
					d.AttentionImbalance < c.AttentionImbalance) {
					t.Errorf("%v, %d ranks: imbalance %v, of contiguous ranks %v", mode, ranks, d.AttentionImbalance,
						c.AttentionImbalance)
				}
				if d, z := of["document"], of["document-zigzag"]; i == 0 && algorithm == "allgather" &&
					!(d.AttentionBytes > 0 && d.AttentionBytes < z.AttentionBytes) {
					t.Errorf("%v, %d ranks: %v bytes are sent, of documents cut alike %v", mode, ranks,
						d.AttentionBytes, z.AttentionBytes)
				}
			}
		}
		if s := want[0]; s.AttentionImbalance != 1 || s.AttentionBytes != 0 {
			t.Errorf("one rank: imbalance %v, %v bytes sent", s.AttentionImbalance, s.AttentionBytes)
		}
	}
}

// Whole conversations are packed alike for any data and context groups, and after a resume at any step. The last steps
// are of the second epoch.
func TestConversationsTrainAlike(t *testing.T) {
	t.Parallel()
	set := []string{conversations(t), "train.global_batch_size=4", "train.steps=4"}
	want := curve(t, tiny, 1, set...)
	for _, with := range [][]string{{"parallel.data=2"}, {"parallel.data=4"}, {"parallel.data=2", "parallel.context=2"},
		{"parallel.data=1"}} {
		ranks := 4
		if with[0] == "parallel.data=2" && len(with) == 1 {
			ranks = 2
		}
		closeTo(t, fmt.Sprint(with), curve(t, tiny, ranks, append(with, set...)...), want, 2e-5)
	}
	for cut := 1; cut < 4; cut++ {
		o := train.Options{RunDir: t.TempDir(), RunID: "a"}
		mustRun(t, load(t, tiny, 1, append(set, fmt.Sprintf("train.steps=%d", cut))...), 1, o)
		o.RunID, o.Resume, o.NoSave = "b", true, true
		rest := mustRun(t, load(t, tiny, 1, set...), 1, o).steps
		if got, want := losses(rest), losses(want[cut:]); got != want {
			t.Errorf("steps after step %d: %v, want %v", cut, got, want)
		}
	}
}

// conversations writes records with masks, and returns the key that packs them.
func conversations(t *testing.T) string {
	t.Helper()
	var lines strings.Builder
	for k, n := range []int{5, 16, 3, 9, 30, 1, 7, 12, 4, 4, 8, 2, 6, 11, 5, 13, 2, 3} {
		ids, mask := make([]string, n), make([]string, n)
		for i := range ids {
			ids[i], mask[i] = strconv.Itoa((7*k+3*i)%256), strconv.Itoa(min(1, (k+i)%3))
		}
		fmt.Fprintf(&lines, "{\"input_ids\":[%s],\"loss_mask\":[%s]}\n", strings.Join(ids, ","), strings.Join(mask, ","))
	}
	return "data={path: " + writeFile(t, "a.jsonl", lines.String()) + ", seq_len: 24, pack_documents: true}"
}

// A run resumed from a checkpoint has the bits of an uninterrupted one.
func TestDocumentsGoOnFromACheckpoint(t *testing.T) {
	set := []string{"data.pack_documents=true", "parallel.layout=document", "parallel.algorithm=allgather",
		"checkpoint.every=2", "data.seq_len=61"}
	dir := t.TempDir()
	whole := curve(t, tiny, 3, set...)
	cfg := load(t, tiny, 3, append(set, "train.steps=2")...)
	mustRun(t, cfg, 3, train.Options{RunDir: dir, RunID: "a"})
	cfg = load(t, tiny, 3, set...)
	rest := mustRun(t, cfg, 3, train.Options{RunDir: dir, RunID: "b", Resume: true}).steps
	if got, want := losses(rest), losses(whole[2:]); got != want {
		t.Errorf("steps after a checkpoint: %v, want %v", got, want)
	}
}

// A verification may take prefixes of samples of whole documents, which cut the last one.
func TestPrefixesOfConversationsAreVerified(t *testing.T) {
	cfg := load(t, tiny, 1, conversations(t), "data.seq_len=12", "train.global_batch_size=2")
	dir, room, v := t.TempDir(), train.MemoryOf(t, cfg, 1).Room(), train.Verified{}
	err := train.Locally(1, "flash", tensor.F32, 0, func(_ int, dev *device.Device, world *comm.Group) (err error) {
		v, err = train.Verify(t.Context(), cfg, *dev, world, train.Options{RunDir: dir, Room: room},
			train.Probing{Whole: 24, Leak: true})
		return err
	})
	if err != nil || len(v.Samples) != 4 || v.Steps[0].Blank || !(v.Steps[1].Loss > 0) || len(v.Probes) != 2 {
		t.Fatalf("%+v, %v", v, err)
	}
	f, err := safetensors.Open(train.VerifiedFile(dir, 0, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if info, _ := f.Info(train.BatchTensor); info.Shape[0] != 24 {
		t.Errorf("%d rows of two samples of 12", info.Shape[0])
	}
}
