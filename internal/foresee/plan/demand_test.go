package plan

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/ring/scan"
)

// buffersOf returns the most that the ring of any rank takes for a sample of these documents.
func buffersOf(t *testing.T, cfg *config.Config, docs []int) (most int64) {
	t.Helper()
	for _, layers := range backend.Requests(cfg) {
		spec, err := specOf(cfg, docs, layers.Mixer())
		if err != nil {
			t.Fatal(err)
		}
		schedules, err := ring.NewPlanner(cfg.Parallel.Algorithm, spec)
		if err != nil {
			t.Fatal(err)
		}
		schedules.Prepare()
		for rank := range spec.Size {
			tokens := partition.Count(spec.Layout.Spans(spec.SeqQ, spec.Size, rank))
			r, _, _, err := recorded(cfg, schedules.Schedule(rank), layers.Mixer(), tokens)
			if err != nil {
				t.Fatal(err)
			}
			most = max(most, r.Buffers())
		}
	}
	return most
}

// The plan covers the buffers of any documents to within an eighth: 3 of 14,400 samples in the long form take more than
// planned.
func TestBuffersOfPackedDocuments(t *testing.T) {
	cases := 1200
	if testing.Short() {
		cases = 30
	}
	rng := rand.New(rand.NewPCG(1, 2))
	pick := func(list ...string) string { return list[rng.IntN(len(list))] }
	for range cases {
		n, ranks := []int{1000, 1024, 2048, 3000, 4099}[rng.IntN(5)], []int{2, 3, 4, 6, 8}[rng.IntN(5)]
		set := []string{"data.pack_documents=true", fmt.Sprint("data.seq_len=", n),
			"parallel.layout=" + pick("document", "document-zigzag", "zigzag", "striped", "window", "contiguous"),
			"parallel.algorithm=" + pick("ring", "allgather", "ulysses", "hierarchical"),
			"model.sliding_window=" + pick("null", "64", "100", "512", "1000")}
		cfg := load(t, ranks, set...)
		if cfg.Parallel.Algorithm != "ulysses" {
			cfg.Parallel.Gather = pick(ring.Gathers...)
		}
		d, err := demandOf(cfg, machine.Machine{}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		for range 12 {
			var docs []int
			longest := max(1, n/[]int{1, 2, 4, 10, 50}[rng.IntN(5)])
			for left := n; left > 0; left -= docs[len(docs)-1] {
				docs = append(docs, min(left, 1+rng.IntN(longest)))
			}
			if got := buffersOf(t, cfg, docs); got > d.buffers+d.buffers/8 {
				t.Errorf("%d ranks, %v: documents %v take %d bytes, planned are %d", ranks, set, docs, got, d.buffers)
			}
		}
	}
}

// The plan covers the states of any documents in layouts that do not follow them. In the others, it covers samples of 50
// documents and more, given such a sample.
func TestSegmentsOfPackedDocuments(t *testing.T) {
	cases := 100
	if testing.Short() {
		cases = 20
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for range cases {
		n, ranks := []int{1000, 2048, 4099, 65536}[rng.IntN(4)], []int{1, 2, 3, 4, 8}[rng.IntN(5)]
		for _, layout := range []string{"contiguous", "zigzag", "window", "document", "document-zigzag"} {
			set := []string{"data.pack_documents=true", fmt.Sprint("data.seq_len=", n), "parallel.layout=" + layout,
				"model={architecture: qwen3_5_text, layer_types: [linear_attention, full_attention], head_dim: 16}",
				"model.num_hidden_layers=2"}
			cfg := load(t, ranks, set...)
			longest, data := n/[]int{50, 100}[rng.IntN(2)], &Data{}
			if !cfg.Parallel.Layout.ByDocument() {
				longest = n / []int{1, 2, 4, 10, 50, 100}[rng.IntN(6)]
			}
			var d *demand
			for range 12 {
				docs := []int{}
				for left := n; left > 0; left -= docs[len(docs)-1] {
					docs = append(docs, min(left, 1+rng.IntN(longest)))
				}
				if cfg.Parallel.Layout.ByDocument() && d == nil {
					data.First = docs
				}
				spec, err := specOf(cfg, docs, widest(cfg))
				if err == nil && d == nil {
					d, err = demandOf(cfg, machine.Machine{}, data, nil)
				}
				if err != nil {
					t.Fatal(err)
				}
				x, err := partition.NewSegments(spec.Shape)
				if err != nil {
					t.Fatal(err)
				}
				for rank, own := range x.Own {
					states := len(scan.NewStates(x, rank).Forward.States)
					if states > d.states || data.First != nil && len(own) > d.segments {
						t.Errorf("%d ranks, %v: rank %d has %d segments and %d states, planned are %d and %d", ranks, set, rank,
							len(own), states, d.segments, d.states)
					}
				}
			}
		}
	}
}
