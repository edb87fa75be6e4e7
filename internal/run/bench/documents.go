package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
)

const (
	// MagiName is the value of --documents for MagiPacks.
	MagiName = "magi"
	// maxPacks bounds a file of packs, in bytes.
	maxPacks = 16 << 20
	// packIters counts the iterations per pack by default; it is low, since there are many packs.
	packIters = 3
)

// Load reads the packs of documents: MagiPacks of the spec's length, or a JSON file with lists of lengths.
func (s *AttentionSpec) Load() (err error) {
	if s.Documents != "" && s.PackCount < 1 {
		return fmt.Errorf("--packs %d: want at least 1", s.PackCount)
	}
	switch s.Documents {
	case "":
		return nil
	case MagiName:
		if len(s.Seq) != 1 {
			return fmt.Errorf("--documents magi: want one --seq, the tokens of a pack, not %d", len(s.Seq))
		}
		if s.Packs, err = MagiPacks(s.Seq[0], s.PackCount); err != nil {
			return fmt.Errorf("--documents magi: %w", err)
		}
		return nil
	}
	text, err := files.Read(s.Documents, maxPacks)
	if err == nil {
		err = json.Unmarshal(text, &s.Packs)
	}
	if err != nil {
		return fmt.Errorf("--documents: want %s or a JSON file with lists of lengths: %w", MagiName, err)
	}
	s.Packs = s.Packs[:min(len(s.Packs), s.PackCount)]
	s.Seq = nil
	for _, docs := range s.Packs {
		if n := sum(docs); !slices.Contains(s.Seq, n) {
			s.Seq = append(s.Seq, n)
		}
	}
	return nil
}

func sum(docs []int) (n int) {
	for _, d := range docs {
		n += max(d, 0) // the mask reports negative lengths
	}
	return n
}

// PackedRow is attention over packs of documents, as medians over the packs. Seconds count on the slowest rank.
// FLOPs count only visible pairs.
type PackedRow struct {
	Layout    string `json:"layout"`
	Algorithm string `json:"algorithm"`
	Gather    string `json:"gather"` // when an all-gather sends its rows
	Backend   string `json:"backend"`
	Ranks     int    `json:"ranks"`
	Packs     int    `json:"packs"`
	Tokens    int    `json:"tokens"` // of the longest pack
	Iters     int    `json:"iters"`  // of each pack

	FLOPs    float64 `json:"flops"` // forward, of all ranks
	Forward  Rate    `json:"forward"`
	Backward Rate    `json:"backward"` // Both minus Forward
	Both     Rate    `json:"forward_backward"`
	// UserSeconds is the CPU time of a forward and a backward pass on the rank with most. Ranks that share cores hide
	// some of it while they wait. On a GPU it is only the host's part.
	UserSeconds float64 `json:"user_seconds"`

	Imbalance      float64 `json:"imbalance"` // visible pairs of the slowest rank over the mean, averaged over the packs
	WorstImbalance float64 `json:"worst_imbalance"`
	// Sent counts the bytes of a forward and a backward pass, on the rank with most.
	Sent int64 `json:"sent_bytes"`
	// Dispatch is the host's time in seconds for the layout and the schedule of a pack.
	Dispatch float64 `json:"dispatch_seconds"`
}

func (r *PackedRow) line() string {
	unit, scale := flopUnit(max(r.Forward.TFLOPs, r.Both.TFLOPs))
	return fmt.Sprintf("%s %s: forward %s, backward %s %s per device", r.Layout, pattern(r.Algorithm, r.Gather),
		readable.Number(scale*r.Forward.TFLOPs), readable.Number(scale*r.Backward.TFLOPs), unit)
}

// packed measures packs of documents and passes a row for each layout and algorithm to emit. It alternates the rows
// pack by pack, since clocks and other load change over time.
func (t *attentionRun) packed(ctx context.Context, emit func(Row) error) error {
	s, rows := t.spec, t.spec.rows()
	e := effort{warmup: s.Warmup, iters: s.Iters, budget: s.Seconds / float64(len(s.Packs)), most: math.MaxInt}
	if s.Seconds == 0 {
		e.iters = cmp.Or(s.Iters, packIters)
	}
	measured := make([][]*sequence, len(rows))
	for i, docs := range s.Packs {
		for j, w := range rows {
			start := t.arena.Mark()
			x, err := t.sequence(ctx, w.Strategy, docs, e)
			if err != nil {
				return fmt.Errorf("pack %d, %s: %w", i+1, w.Strategy, err)
			}
			t.arena.Release(start)
			measured[j] = append(measured[j], x)
		}
	}
	for _, packs := range measured {
		if err := emit(Row{Packed: packedRow(packs)}); err != nil {
			return err
		}
	}
	return nil
}

func packedRow(packs []*sequence) *PackedRow {
	median := func(of func(*sequence) float64) float64 {
		var all []float64
		for _, x := range packs {
			all = append(all, of(x))
		}
		return Median(all)
	}
	rates := func(of func(*sequence) Rate) Rate {
		return Rate{Seconds: median(func(x *sequence) float64 { return of(x).Seconds }),
			TFLOPs: median(func(x *sequence) float64 { return of(x).TFLOPs })}
	}
	last := packs[len(packs)-1]
	row := &PackedRow{
		Layout: last.Layout, Algorithm: last.Algorithm, Gather: last.Gather, Backend: last.Backend, Ranks: last.Ranks,
		Packs: len(packs), Iters: last.Iters,
		FLOPs:   median(func(x *sequence) float64 { return x.FLOPs }),
		Forward: rates(func(x *sequence) Rate { return x.Forward }),
		Backward: rates(func(x *sequence) Rate {
			seconds := x.Both.Seconds - x.Forward.Seconds // below 0 by noise
			return Rate{Seconds: seconds, TFLOPs: rate((bothOfForward-1)*x.FLOPs, seconds, x.Ranks).TFLOPs}
		}),
		Both:        rates(func(x *sequence) Rate { return x.Both }),
		UserSeconds: median(func(x *sequence) float64 { return x.user }),
		Sent:        int64(median(func(x *sequence) float64 { return float64(x.SentForward + x.SentBackward) })),
		Dispatch:    median(func(x *sequence) float64 { return x.dispatch }),
	}
	for _, x := range packs {
		row.Tokens = max(row.Tokens, x.Seq)
		row.Imbalance += x.imbalance / float64(len(packs))
		row.WorstImbalance = max(row.WorstImbalance, x.imbalance)
	}
	return row
}

func (a *Attention) packTable(on string) readable.Table {
	most := 0.0
	for _, r := range a.Packed {
		most = max(most, r.Forward.TFLOPs, r.Backward.TFLOPs)
	}
	unit, scale := flopUnit(most)
	first := &a.Packed[0]
	t := readable.Table{
		Title: fmt.Sprintf("%s, packed documents of %s, %d packs of up to %s tokens; %s; %s per device, slowest "+
			"rank, medians of the packs",
			a.Spec.what(), a.Spec.Documents, first.Packs, readable.Size(int64(first.Tokens)), on, unit),
		Head: []string{"layout", "pattern", "backend", "forward ms", unit, "backward ms", unit, "both ms", "user ms",
			"imbalance", "worst", "sent", "dispatch ms"},
		Notes: []string{
			"FLOPs count only visible pairs; user: CPU time of the slowest rank",
			"imbalance: visible pairs of the slowest rank over the mean",
			"sent: bytes of a rank, forward and backward; dispatch: host time for layout and schedule",
		},
	}
	for _, r := range a.Packed {
		t.Add(r.Layout, pattern(r.Algorithm, r.Gather), r.Backend, readable.Number(1e3*r.Forward.Seconds),
			readable.Number(scale*r.Forward.TFLOPs),
			readable.Number(1e3*r.Backward.Seconds), readable.Number(scale*r.Backward.TFLOPs),
			readable.Number(1e3*r.Both.Seconds), readable.Number(1e3*r.UserSeconds),
			fmt.Sprintf("%.3f", r.Imbalance), fmt.Sprintf("%.3f", r.WorstImbalance), readable.Bytes(r.Sent),
			readable.Number(1e3*r.Dispatch))
	}
	return t
}

// magiBins are the document lengths of MagiAttention's benchmark of packed documents
// (SandAI-org/MagiAttention, exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv, at
// 2c64135): the number of documents with the middle length of each bin.
var magiBins = []struct{ from, to, documents int }{
	{0, 10, 30254}, {11, 50, 391188}, {51, 100, 699596}, {101, 200, 1377757}, {201, 500, 3794735}, {501, 1024, 3316785},
	{1025, 2048, 2106566}, {2049, 4096, 988525}, {4097, 8192, 410002}, {8193, 16384, 173574}, {16385, 32768, 115007},
	{32769, 65536, 18428}, {65537, 131072, 22513}, {131073, 196608, 18284},
}

// leastPack is the least number of tokens of a pack: less would cut documents into more pieces than memory holds.
const leastPack = 512

// MagiPacks returns the first packs of MagiAttention's benchmark of packed documents, as lists of lengths that sum to
// tokens each. It cuts documents longer than a quarter of a pack, shuffles them, fills packs in order, continues a
// document that does not fit in the next pack, and shuffles the packs. Its random numbers are those of
// numpy.random.default_rng(42), so the packs are the same. tokens must be a multiple of 4, at least 512.
func MagiPacks(tokens, packs int) ([][]int, error) {
	piece := tokens / 4
	if tokens < leastPack || tokens%4 != 0 {
		return nil, fmt.Errorf("packs of %d tokens: want a multiple of 4, at least %d", tokens, leastPack)
	}
	lengths, total := magiLengths(piece)
	rng := newPCG()
	shuffle(rng, lengths)
	order := make([]int32, total/tokens)
	for i := range order {
		order[i] = int32(i)
	}
	shuffle(rng, order)
	order = order[:min(packs, len(order))]
	place := make(map[int32]int, len(order))
	for i, pack := range order {
		place[pack] = i
	}
	out := make([][]int, len(order))
	cutPacks(lengths, tokens, func(pack int32, length int) {
		if i, ok := place[pack]; ok {
			out[i] = append(out[i], length)
		}
	})
	return out, nil
}

// magiLengths lists the lengths before the shuffle: the whole pieces, then the tails of each bin.
func magiLengths(piece int) (lengths []int32, total int) {
	add := func(length, n int) {
		total += length * n
		lengths = slices.Grow(lengths, n)
		for range n {
			lengths = append(lengths, int32(length))
		}
	}
	for _, b := range magiBins {
		add(piece, (b.from+b.to)/2/piece*b.documents)
	}
	for _, b := range magiBins {
		if tail := (b.from + b.to) / 2 % piece; tail > 0 {
			add(tail, b.documents)
		}
	}
	return lengths, total
}

func cutPacks(lengths []int32, tokens int, see func(pack int32, length int)) {
	pack, left := int32(0), tokens
	for _, n := range lengths {
		for length := int(n); length > 0; {
			part := min(length, left)
			see(pack, part)
			if length, left = length-part, left-part; left == 0 {
				pack, left = pack+1, tokens
			}
		}
	}
}

// shuffle implements numpy.random.Generator.shuffle.
func shuffle(rng *pcg, list []int32) {
	for i := len(list) - 1; i > 0; i-- {
		j := rng.upTo(uint32(i))
		list[i], list[j] = list[j], list[i]
	}
}

// A pcg is numpy's PCG64: O'Neill, PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for
// Random Number Generation, 2014, XSL-RR of 128 bits.
type pcg struct {
	hi, lo uint64
	half   uint32 // upper half of the last 64 bits, if kept
	kept   bool
}

// newPCG returns numpy.random.default_rng(42). numpy hashes its state from the seed.
func newPCG() *pcg {
	return &pcg{hi: 0xcea44f6798798f2a, lo: 0xacbc7c9d68860ac8}
}

func (p *pcg) step() {
	const mulHi, mulLo = 2549297995355413924, 4865540595714422341
	const incHi, incLo = 0xfa505436c9a8416e, 0x66caf2e28d25abff // of that seed
	hi, lo := bits.Mul64(p.lo, mulLo)
	hi += p.hi*mulLo + p.lo*mulHi
	var carry uint64
	p.lo, carry = bits.Add64(lo, incLo, 0)
	p.hi, _ = bits.Add64(hi, incHi, carry)
}

func (p *pcg) next() uint64 {
	p.step()
	return bits.RotateLeft64(p.hi^p.lo, -int(p.hi>>58))
}

// next32 returns the halves of a 64-bit number in turn, the low one first.
func (p *pcg) next32() uint32 {
	if p.kept {
		p.kept = false
		return p.half
	}
	x := p.next()
	p.half, p.kept = uint32(x>>32), true
	return uint32(x)
}

// upTo returns a number from 0 to most, by rejection sampling.
func (p *pcg) upTo(most uint32) uint32 {
	mask := uint32(1)<<bits.Len32(most) - 1
	for {
		if x := p.next32() & mask; x <= most {
			return x
		}
	}
}
