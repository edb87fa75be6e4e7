package bench

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/planner"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/kernels/gpu"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// An AttentionSpec describes the rows of `bench attention`: every combination of algorithm, layout and length.
type AttentionSpec struct {
	Seq        []int    `json:"seq"` // global tokens
	Algorithms []string `json:"algorithms"`
	// with hierarchical: ranks that exchange heads; 0: auto
	Inner       int `json:"inner,omitempty"`
	GatherHeads int `json:"gather_heads,omitempty"` // with allgather: key heads per gather; 0: all
	// values of ring.Gathers, one row each with allgather; other algorithms use the first
	Gathers       []string `json:"gather"`
	Layouts       []string `json:"layouts"`
	Backend       string   `json:"backend"`
	DType         string   `json:"dtype"`
	Heads         int      `json:"heads"`
	KVHeads       int      `json:"kv_heads"`
	HeadDim       int      `json:"head_dim"`
	Causal        bool     `json:"causal"`
	Window        int      `json:"window"` // visible keys before a query; -1: all
	Deterministic bool     `json:"deterministic"`
	Iters         int      `json:"iters"`             // 0: for two seconds, or Seconds
	Seconds       float64  `json:"seconds,omitempty"` // minimum time of a figure
	Warmup        int      `json:"warmup"`
	Quick         bool     `json:"quick,omitempty"` // time the two passes only

	// Rows are the cases with their chosen strategies; none: see Asked.
	Rows []AttentionCase `json:"rows,omitempty"`
	// Predicted lists the candidates of auto with their predicted seconds, the best first, if there is only one row.
	Predicted []planner.Timed `json:"predicted,omitempty"`

	// Documents is the source of packed documents: "magi", a file, or "" for none. PackCount limits the packs.
	Documents string  `json:"documents,omitempty"`
	PackCount int     `json:"pack_count,omitempty"`
	Packs     [][]int `json:"packs,omitempty"` // document lengths of each pack, set by Load
}

// Default fills unset fields with sizes that take a device some seconds. Packed documents follow MagiAttention's
// benchmark, with shorter sequences on a CPU.
func (s *AttentionSpec) Default(device string, ranks int) {
	d := AttentionSpec{Seq: []int{512, 1 << 10}, Heads: 4, KVHeads: 2, HeadDim: 32, DType: "fp32",
		Layouts: []string{"zigzag"}}
	if s.Documents != "" {
		d.Seq, d.Layouts = []int{512 * ranks}, []string{"document"}
	}
	if device != "cpu" {
		d.Seq, d.Heads, d.KVHeads, d.HeadDim, d.DType = []int{32 << 10, 128 << 10, 512 << 10}, 32, 8, 128, "bf16"
		if s.Documents != "" {
			d.Seq, d.Heads = []int{8192 * ranks}, 64
		}
	}
	if len(s.Layouts) == 0 {
		s.Layouts = d.Layouts
	}
	if len(s.Seq) == 0 {
		s.Seq = d.Seq
	}
	if s.Heads == 0 {
		s.Heads, s.KVHeads = d.Heads, cmp.Or(s.KVHeads, d.KVHeads)
	}
	s.KVHeads = cmp.Or(s.KVHeads, s.Heads)
	s.HeadDim = cmp.Or(s.HeadDim, d.HeadDim)
	if s.DType == "auto" {
		s.DType = d.DType
	}
}

// Check reports faults of a spec before any process is spawned.
func (s *AttentionSpec) Check(ranks int) error {
	switch {
	case s.Documents != "" && len(s.Packs) == 0:
		return fmt.Errorf("--documents %s: it has no packs", terminal.Name(s.Documents))
	case len(s.Seq) == 0:
		return fmt.Errorf("--seq: no length given")
	case s.Documents == "" && slices.Min(s.Seq) < 1:
		return fmt.Errorf("--seq %d: want at least 1", slices.Min(s.Seq))
	case len(s.Algorithms) == 0 || slices.Contains(s.Algorithms, ""):
		return fmt.Errorf("--algorithm: want NAME,... of %s, or auto", strings.Join(ring.Algorithms, ", "))
	case s.Heads < 1 || s.KVHeads < 1 || s.Heads%s.KVHeads != 0:
		return fmt.Errorf("--heads %d --kv-heads %d: the first must be a multiple of the second", s.Heads, s.KVHeads)
	case s.Inner < 0 || s.GatherHeads < 0:
		return fmt.Errorf("--ulysses-degree %d --gather-heads %d: want 0 or more", s.Inner, s.GatherHeads)
	case s.HeadDim < 1:
		return fmt.Errorf("--head-dim %d: want at least 1", s.HeadDim)
	case s.Window < -1 || s.Window >= 0 && !s.Causal:
		return fmt.Errorf("--window %d: want the number of visible keys before a query, with --causal; -1 is all", s.Window)
	case s.Iters < 0 || s.Warmup < 0:
		return fmt.Errorf("--iters %d --warmup %d: want 0 or more", s.Iters, s.Warmup)
	case !(s.Seconds >= 0) || math.IsInf(s.Seconds, 0) || s.Seconds > 0 && s.Iters > 0:
		return fmt.Errorf("--seconds %v: want a number above 0, without --iters", s.Seconds)
	}
	early := slices.ContainsFunc(s.Gathers, func(g string) bool { return g != ring.Auto })
	for _, f := range []struct {
		flag, needs string
		set         bool
	}{
		{"--ulysses-degree", "hierarchical", s.Inner > 0},
		{"--gather-heads", "allgather", s.GatherHeads > 0},
		{"--gather", "allgather", early && s.Window < 0},
	} {
		if f.set && !slices.Contains(s.Algorithms, f.needs) && !slices.Contains(s.Algorithms, "auto") {
			return fmt.Errorf("%s has no effect without --algorithm %s; drop it", f.flag, f.needs)
		}
	}
	for _, g := range s.Gathers {
		if !slices.Contains(ring.Gathers, g) {
			return fmt.Errorf("--gather %q is none of %v", g, ring.Gathers)
		}
	}
	for _, w := range s.rows() {
		if err := w.Layout.Check(); err != nil {
			return fmt.Errorf("--layout: %w", err)
		}
		if w.Layout.ByDocument() && s.Documents == "" {
			return fmt.Errorf("--layout %s needs --documents; without them use zigzag, striped, contiguous or window", w.Layout)
		}
		for i, docs := range s.sequences(w) {
			shape, err := s.shape(w.Layout, docs, ranks)
			switch {
			case err != nil && s.Documents != "":
				return fmt.Errorf("--documents %s: pack %d: %w", terminal.Name(s.Documents), i+1, err)
			case err != nil:
				return err
			case sum(docs) < 2*ranks && s.Documents != "":
				return fmt.Errorf("--documents %s: pack %d: its %d tokens are too few for %d ranks", terminal.Name(s.Documents),
					i+1, sum(docs), ranks)
			case w.Seq < 2*ranks:
				return fmt.Errorf("--seq %d: too short for %d ranks", w.Seq, ranks)
			}
			if _, err := ring.New(w.Algorithm, w.Spec(shape, s.Heads, s.KVHeads), 0); err != nil {
				return fmt.Errorf("--algorithm: %w", err)
			}
		}
	}
	return nil
}

// Needs returns the bytes of q, k, v, the output and their gradients in 16 bits. A run takes more.
func (s *AttentionSpec) Needs(seq int) float64 {
	return 2 * float64(seq) * float64(s.HeadDim) * (4*float64(s.Heads) + 4*float64(s.KVHeads))
}

// sequences returns the document lengths of each sequence of a row.
func (s *AttentionSpec) sequences(w AttentionCase) [][]int {
	if s.Documents != "" {
		return s.Packs
	}
	return [][]int{{w.Seq}}
}

// Longest returns the documents of the longest pack; nil without documents.
func (s *AttentionSpec) Longest() []int {
	if len(s.Packs) == 0 {
		return nil
	}
	return slices.MaxFunc(s.Packs, func(a, b []int) int { return cmp.Compare(sum(a), sum(b)) })
}

func (s *AttentionSpec) shape(layout partition.LayoutName, docs []int, ranks int) (partition.Shape, error) {
	if i := slices.IndexFunc(docs, func(d int) bool { return d < 1 }); i >= 0 {
		return partition.Shape{}, fmt.Errorf("document %d has %d tokens", i, docs[i])
	}
	n, packed := sum(docs), docs
	if s.Documents == "" {
		packed = nil
	}
	mask, err := partition.NewMask(s.Causal, s.Window, n, n, packed)
	if err != nil {
		return partition.Shape{}, err
	}
	l := partition.Ready(layout.Layout(docs, mask.Band), n, ranks)
	return partition.Shape{SeqQ: n, SeqKV: n, Size: ranks, Layout: l, Mask: mask}, nil
}

// An AttentionCase is a row to measure: attention over a sequence by a strategy. With packed documents, Seq is the
// length of the longest pack.
type AttentionCase struct {
	Seq int `json:"seq"`
	ring.Strategy
}

func (s *AttentionSpec) rows() []AttentionCase {
	if len(s.Rows) > 0 {
		return s.Rows
	}
	return s.Asked()
}

// Asked lists the rows of the spec before auto is resolved: every length, layout and algorithm, and for all-gather
// every gather mode.
func (s *AttentionSpec) Asked() (all []AttentionCase) {
	gathers, lengths := s.Gathers, s.Seq
	if len(gathers) == 0 {
		gathers = []string{""}
	}
	if s.Documents != "" && len(s.Seq) > 0 {
		lengths = []int{slices.Max(s.Seq)}
	}
	for _, seq := range lengths {
		for _, layout := range s.Layouts {
			for _, algorithm := range s.Algorithms {
				for i, gather := range gathers {
					w := ring.Strategy{Layout: partition.LayoutName(layout), Algorithm: algorithm, Gather: gather, Backend: s.Backend}
					switch {
					case i > 0 && algorithm != "allgather":
						continue
					case algorithm == "allgather" || algorithm == "auto":
						w.GatherHeads = s.GatherHeads
					}
					if algorithm == "hierarchical" || algorithm == "auto" {
						w.Inner = s.Inner
					}
					all = append(all, AttentionCase{seq, w})
				}
			}
		}
	}
	return all
}

// Demand returns the bytes of a rank for the tensors of the largest row, and for the workspace of fused attention. It
// runs all rows on an arena that only counts.
func (s *AttentionSpec) Demand(ranks, rank int, m machine.Machine) (tensors, workspace int64, err error) {
	for _, w := range s.rows() {
		for _, docs := range s.sequences(w) {
			meter, record := tensor.NewMeter(), planner.Recorder{}
			p, err := s.pass(w.Strategy, docs, ranks, rank, meter)
			if err != nil {
				return 0, 0, err
			}
			p.ring = record.Ring()
			p.ring.Arena = meter
			if err := p.both(); err != nil {
				return 0, 0, err
			}
			tensors = max(tensors, meter.Peak())
			for _, x := range record.Works {
				workspace = max(workspace, gpu.FusedWorkspace(gpu.FusedShape{
					Batch: 1, SeqQ: x.Queries, SeqK: x.Keys, Heads: x.Heads, KVHeads: x.KVHeads, Dim: s.HeadDim,
					DimV: s.HeadDim, Calls: x.Calls, Training: true,
					Packed:        s.Documents != "" && backends.Packs(m.Arch, m.CUDNN),
					Deterministic: s.Deterministic && backends.KeepsMatrix(m.Arch, m.CUDNN),
				}))
			}
		}
	}
	return tensors, workspace, nil
}
