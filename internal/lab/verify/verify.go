// Package verify decides whether a run is right. It compares two steps of one rank with those of several. It compares
// both with the records of the data, the masks of the layers, and its own optimizer. The ranks write their results in
// train.Verify:
//
//	one, err := verify.Open(dir, 1, verified, seqLen) // and many likewise
//	err = verify.Compare(report, cfg, whole, one, many)
package verify

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/tensor"
)

// Float is a number or absent; see package metrics.
type Float = metrics.Float

// A Report is the result of a verification. A nil field could not be checked; Reasons has its JSON name.
type Report struct {
	// OK is false if there are Differences, and nil after a crash, which Error describes. docs/verify.md explains
	// the parts.
	OK            *bool             `json:"ok"`
	Error         string            `json:"error,omitempty"`
	Config        string            `json:"config"`
	Device        string            `json:"device"`
	Ranks         int               `json:"ranks"`
	Compute       string            `json:"compute"`
	Strategy      string            `json:"strategy"`
	CheckedTokens int               `json:"checked_tokens"`
	BatchTokens   int               `json:"batch_tokens"`
	Documents     *Documents        `json:"documents"`
	Tokens        *Counts           `json:"tokens"`
	Targets       *Counts           `json:"targets"`
	Tolerance     float64           `json:"tolerance"`
	Loss          *Sides            `json:"loss"`
	Gradients     []Gradient        `json:"gradients"`
	Leak          *Leak             `json:"leak"`
	Step          *Step             `json:"step"`
	Rope          *Rope             `json:"rope"`
	Varied        []string          `json:"varied"`
	Linears       *Linears          `json:"linears"`
	Kernels       []train.KernelUse `json:"kernels"`
	Routes        *train.Routed     `json:"routes"`
	Differences   []string          `json:"differences"`
	Reasons       map[string]string `json:"reasons"`
	allowed       float64           // share of the norm of all gradients that bounds the rounding of one; 0: by Tolerance
}

// Documents counts the documents of the batch by the records and by the ranks, and repeated ones beyond the records.
type Documents struct {
	// These are numbers of documents.
	Records  int `json:"records"`
	Batch    int `json:"batch"`
	Repeated int `json:"repeated"`
}

// Counts counts tokens or targets of the batch by the records, on one rank, and on several.
type Counts struct {
	// These are the three counts.
	Records int `json:"records"`
	One     int `json:"one"`
	Many    int `json:"many"`
}

// Sides is a value on one rank and on several.
type Sides struct {
	// These are the two values.
	One  Float `json:"one"`
	Many Float `json:"many"`
}

// A Gradient compares the gradient of a parameter.
type Gradient struct {
	// Name is the parameter's, and Error the norm of the difference over the norm of one rank's gradient.
	Name  string `json:"name"`
	Error Float  `json:"relative_error"`
}

// A Leak counts logits that differ after changes of tokens, over all probes.
type Leak struct {
	// These are sums over Probes.
	Allowed int     `json:"rows_allowed"`
	Changed int     `json:"rows_changed"`
	Wrong   int     `json:"rows_wrong"`
	Probes  []Probe `json:"probes"`
}

// A Probe is a change of one token of the first sample.
type Probe struct {
	// Position and Document place the token. Shard is the rank whose shard it was picked from, or -1. The others count
	// rows.
	Position int `json:"position"`
	Document int `json:"document"`
	Shard    int `json:"shard"`
	Allowed  int `json:"rows_allowed"`
	Changed  int `json:"rows_changed"`
	Wrong    int `json:"rows_wrong"`
}

// A Side is the results of one rank, or of several.
type Side struct {
	train.Verified
	Dir     string // of the files
	files   []*safetensors.File
	batch   [][]Row                                    // by sample of the batches of all steps
	trained []int64                                    // the sample trained at each place of batch; missing: none
	parts   [train.VerifiedSteps + 1]map[string][]part // of gradients and parameters, after a number of steps
	weights [][]byte                                   // checksums of the weights, by rank
	keys    map[[2]int][]float32                       // rotated keys, by layer and position
}

// A part is elements of a gradient in a file, from index lo.
type part struct {
	file *safetensors.File
	name string
	lo   int64
}

// Open opens the results of ranks in a directory. The caller closes them.
func Open(dir string, ranks int, v train.Verified, length int) (*Side, error) {
	s := &Side{Verified: v, Dir: dir, keys: map[[2]int][]float32{}}
	for range v.Samples {
		s.batch = append(s.batch, slices.Repeat([]Row{{ID: missing}}, length))
		s.trained = append(s.trained, missing)
	}
	for steps := range s.parts {
		s.parts[steps] = map[string][]part{}
		for r := range ranks {
			f, err := safetensors.Open(train.VerifiedFile(dir, r, steps))
			if err == nil {
				s.files = append(s.files, f)
				err = s.read(f, steps)
			}
			if err != nil {
				return nil, errors.Join(err, s.Close())
			}
		}
	}
	for i, rows := range s.batch { // documents may leave an end empty
		for len(rows) > 0 && rows[len(rows)-1].ID == missing {
			rows = rows[:len(rows)-1]
		}
		s.batch[i] = rows
	}
	return s, nil
}

// missing marks a token that no rank has loaded.
const missing = -1

func (s *Side) read(f *safetensors.File, steps int) (err error) {
	for _, name := range f.Names() {
		kind, place, _ := strings.Cut(name, "/")
		switch kind {
		case train.BatchTensor:
			err = s.readBatch(f)
		case train.RouteTensor: // for other sides
		case train.TrainedTensor:
			err = s.readTrained(f)
		case train.WeightsTensor:
			info, _ := f.Info(name)
			s.weights = append(s.weights, make([]byte, info.Bytes()))
			err = f.ReadBytes(name, s.weights[len(s.weights)-1], 0)
		case train.KeyTensors:
			var at [2]int
			if _, err = fmt.Sscanf(place, "%d/%d", &at[0], &at[1]); err == nil {
				info, _ := f.Info(name)
				s.keys[at] = make([]float32, info.Elements())
				err = f.ReadFloat32(name, s.keys[at], 0)
			}
		default:
			var lo int64
			of, at, _ := strings.Cut(name, "//")
			if lo, err = strconv.ParseInt(at, 10, 64); err == nil {
				s.parts[steps][of] = append(s.parts[steps][of], part{f, name, lo})
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %s: %w", f.Name(), name, err)
		}
	}
	return nil
}

// of returns the parts of a parameter after some steps.
func (s *Side) of(kind, parameter string, steps int) []part {
	return s.parts[steps][kind+"/"+parameter]
}

// integers reads a tensor.
func integers[T int32 | int64](f *safetensors.File, name string, dtype tensor.DType) ([]T, error) {
	info, _ := f.Info(name)
	list := tensor.New(dtype, int(info.Elements()))
	err := f.ReadBytes(name, tensor.Bytes(list), 0)
	return tensor.Data[T](list), err
}

func (s *Side) readBatch(f *safetensors.File) error {
	rows, err := integers[int32](f, train.BatchTensor, tensor.I32)
	if err != nil {
		return err
	}
	for r := range slices.Chunk(rows, train.VerifiedRow) {
		n, at := int(r[0]), int(r[1])
		if n < 0 || n >= len(s.batch) || at < 0 || at >= len(s.batch[n]) || s.batch[n][at].ID != missing {
			return fmt.Errorf("token %d of sample %d is outside the batch, or loaded twice", at, n)
		}
		s.batch[n][at] = Row{ID: r[2], Target: r[3], Position: r[4], Document: r[5]}
	}
	return nil
}

func (s *Side) readTrained(f *safetensors.File) error {
	pairs, err := integers[int64](f, train.TrainedTensor, tensor.I64)
	if err != nil {
		return err
	}
	for p := range slices.Chunk(pairs, 2) {
		if p[0] < 0 || p[0] >= int64(len(s.trained)) || s.trained[p[0]] != missing && s.trained[p[0]] != p[1] {
			return fmt.Errorf("sample %d is outside the batches, or ranks disagree about its place %d", p[1], p[0])
		}
		s.trained[p[0]] = p[1]
	}
	return nil
}

// Close closes the files.
func (s *Side) Close() error {
	var errs []error
	for _, f := range s.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// first returns the first step's part of all samples.
func first[T any](all []T) []T { return all[:len(all)/train.VerifiedSteps] }

func count(batch [][]Row, is func(Row) bool) (n int) {
	for _, rows := range batch {
		for _, r := range rows {
			if is(r) {
				n++
			}
		}
	}
	return n
}

// Compare compares one rank with several. whole is the length of samples; data.seq_len may be the length of a prefix.
// It fills the parts of a report that depend on results.
func Compare(r *Report, cfg *config.Config, whole int, one, many *Side) error {
	r.Reasons, r.Differences, r.Kernels = map[string]string{}, []string{}, many.Kernels
	r.Tolerance = train.Tolerance(cfg)
	expected, err := expect(cfg, whole, many)
	switch {
	case errors.Is(err, errMixture):
		for _, part := range []string{"documents", "tokens", "targets"} {
			r.Reasons[part] = err.Error()
		}
		r.compareRows(r.side(1), "one rank", many.batch, one.batch)
	case err != nil:
		return fmt.Errorf("reading the records a second time: %w", err)
	default:
		r.compareRecords(expected, one, many, len(cfg.Data.Path) > 1)
	}
	r.CheckedTokens, r.BatchTokens = count(first(many.batch), isToken), many.Tokens
	if expected == nil {
		expected = many.batch
	}
	if err := r.compareSteps(cfg, expected, one, many); err != nil {
		return err
	}
	r.compareLeak(cfg, expected[0], many) // of its first sample alone, so its documents
	r.compareRope(cfg, one)
	r.compareRoutes(many)
	r.OK = new(len(r.Differences) == 0)
	return nil
}

// compareRoutes reports choices of experts that no rounding explains.
func (r *Report) compareRoutes(many *Side) {
	if r.Routes = many.Routes; r.Routes != nil && r.Routes.Wrong > 0 {
		r.differ("routes: %d of %d; %s", r.Routes.Wrong, r.Routes.Choices, cmp.Or(r.Routes.First, "none on rank 0"))
	}
}

const blank = "the batch has no targets"

func (r *Report) differ(format string, args ...any) {
	r.Differences = append(r.Differences, fmt.Sprintf(format, args...))
}

func expect(cfg *config.Config, whole int, many *Side) (batch [][]Row, err error) {
	wholes, others := wholes(cfg)
	var by map[int64][]Row
	switch {
	case wholes > 0 && others > 0:
		return nil, errMixture
	case wholes > 0:
		by, err = wholeRecords(cfg, whole, many.Samples, many.batch)
	default:
		by, err = Records(cfg, whole, many.Samples)
	}
	for _, s := range many.Samples {
		batch = append(batch, by[s][:min(len(by[s]), cfg.Data.SeqLen)])
	}
	return batch, err
}

func isToken(r Row) bool { return r.ID != missing }

func isTarget(r Row) bool { return isToken(r) && r.Target >= 0 }

func (r *Report) compareRecords(expected [][]Row, one, many *Side, mixture bool) {
	counts := func(what string, is func(Row) bool) *Counts {
		c := &Counts{count(first(expected), is), count(first(one.batch), is), count(first(many.batch), is)}
		if c.One != c.Records || c.Many != c.Records {
			r.differ("%s: the records have %d, one rank %d, %d ranks %d", what, c.Records, c.One, r.Ranks, c.Many)
		}
		return c
	}
	r.Tokens, r.Targets = counts("tokens", isToken), counts("targets", isTarget)
	r.Documents = &Documents{documents(first(expected)), documents(first(many.batch)), repeated(expected, many, mixture)}
	if d := r.Documents; d.Batch != d.Records || d.Repeated > 0 {
		r.differ("documents: the records have %d, the batch %d; %d are repeated", d.Records, d.Batch, d.Repeated)
	}
	r.compareRows("one rank", "the records", one.batch, expected)
	r.compareRows(r.side(1), "the records", many.batch, expected)
}

// compareRows reports the first row that differs, by column.
func (r *Report) compareRows(side, other string, have, want [][]Row) {
	columns := []struct {
		name string
		of   func(Row) int32
	}{
		{"id", func(r Row) int32 { return r.ID }}, {"target", func(r Row) int32 { return r.Target }},
		{"position", func(r Row) int32 { return r.Position }}, {"document", func(r Row) int32 { return r.Document }},
	}
	for s := range have {
		if a, b := len(have[s]), len(want[s]); a != b {
			r.differ("sample %d has %d tokens on %s, and %d by %s", s, a, side, b, other)
		}
	}
	for _, c := range columns {
		n, first := 0, ""
		for s := range have {
			for i := range min(len(have[s]), len(want[s])) {
				if a, b := c.of(have[s][i]), c.of(want[s][i]); a != b {
					if n++; n == 1 {
						first = fmt.Sprintf("token %d of sample %d has %d in place of %d", i, s, a, b)
					}
				}
			}
		}
		if n > 0 {
			r.differ("%s of tokens on %s: %d differ from %s; %s", c.name, side, n, other, first)
		}
	}
}

func documents(batch [][]Row) (n int) {
	for _, rows := range batch {
		n += len(cut(rows))
	}
	return n
}

// cut divides the rows of a sample into documents.
func cut(rows []Row) (docs [][]Row) {
	for lo, hi := 0, 1; lo < len(rows); hi++ {
		if hi == len(rows) || rows[hi].Document != rows[lo].Document {
			docs, lo = append(docs, rows[lo:hi]), hi
		}
	}
	return docs
}

// repeated counts documents that are in the batch more often than in the records of its samples. A batch larger than an
// epoch repeats samples. A mixture repeats the samples of a small source.
func repeated(expected [][]Row, many *Side, mixture bool) (n int) {
	samples := first(many.Samples)
	most := (len(samples) + int(many.All) - 1) / int(many.All)
	if mixture {
		most = len(samples)
	}
	left, seen := map[string]int{}, map[int64]int{}
	for i, s := range samples {
		if seen[s]++; seen[s] > most {
			continue
		}
		for _, d := range cut(expected[i]) {
			left[text(d)]++
		}
	}
	have := map[string]int{}
	for _, rows := range first(many.batch) {
		for _, d := range cut(rows) {
			t := text(d)
			if have[t]++; have[t] > max(1, left[t]) {
				n++
			}
		}
	}
	return n
}

// text returns the ids of a document as a key.
func text(rows []Row) string {
	var b []byte
	for _, r := range rows {
		b = binary.LittleEndian.AppendUint32(b, uint32(r.ID))
	}
	return string(b)
}

// elements reads elements from index lo. Every element is in one part.
func elements(parts []part, dst []float32, lo int64) error {
	left := len(dst)
	for _, p := range parts {
		info, _ := p.file.Info(p.name)
		from, to := max(lo, p.lo), min(lo+int64(len(dst)), p.lo+int64(info.Shape[0]))
		if from >= to {
			continue
		}
		if err := p.file.ReadFloat32(p.name, dst[from-lo:to-lo], from-p.lo); err != nil {
			return err
		}
		left -= int(to - from)
	}
	if left != 0 {
		return fmt.Errorf("%d elements too few in the files of the ranks", left)
	}
	return nil
}

func (r *Report) compareLeak(cfg *config.Config, rows []Row, many *Side) {
	if many.Noisy {
		r.Reasons["leak"] = "two equal forward passes gave other bits"
		return
	}
	if len(many.Probes) > 0 && !slices.ContainsFunc(many.Probes, func(p train.Probed) bool { return len(p.Changed) > 0 }) {
		r.Reasons["leak"] = "no other token changes any logits: they are equal for all tokens"
		return
	}
	r.Leak = &Leak{}
	for _, p := range many.Probes {
		if p.Position >= len(rows) { // reported by compareRecords
			continue
		}
		lo, hi := Reach(cfg, rows, p.Position)
		x := Probe{Position: p.Position, Document: int(rows[p.Position].Document), Shard: p.Shard, Allowed: hi - lo}
		own := false
		for _, c := range p.Changed {
			x.Changed += c[1] - c[0]
			x.Wrong += c[1] - c[0] - max(0, min(c[1], hi)-max(c[0], lo))
			own = own || c[0] <= p.Position && p.Position < c[1]
		}
		if x.Wrong > 0 {
			r.differ("leak: token %d of document %d changes %d rows that its masks hide, such as %d", x.Position,
				x.Document, x.Wrong, hidden(p.Changed, lo, hi))
		}
		if !own {
			r.differ("leak: another token at position %d changes no logits there", x.Position)
		}
		l := r.Leak
		l.Allowed, l.Changed, l.Wrong = l.Allowed+x.Allowed, l.Changed+x.Changed, l.Wrong+x.Wrong
		l.Probes = append(l.Probes, x)
	}
}

// hidden returns a position of the ranges outside [lo, hi).
func hidden(ranges [][2]int, lo, hi int) int {
	for _, c := range ranges {
		switch {
		case c[0] < lo:
			return c[0]
		case c[1] > hi:
			return max(c[0], hi)
		}
	}
	return -1
}

// Reach returns the rows whose logits may depend on a token: [at, hi) after all layers. In each layer a query sees keys
// of its document, not after itself, and within the window of the layer.
func Reach(cfg *config.Config, rows []Row, at int) (lo, hi int) {
	end := at
	for end < len(rows) && rows[end].Document == rows[at].Document {
		end++
	}
	m := &cfg.Model
	hi = at + 1
	for layer := range m.NumHiddenLayers {
		if slides(cfg, layer) {
			hi = min(end, hi+m.SlidingWindow-1)
		} else {
			hi = end
		}
	}
	return at, hi
}

// slides reports whether a layer has a window.
func slides(cfg *config.Config, layer int) bool {
	m := &cfg.Model
	return m.SlidingWindow > 0 && (len(m.LayerTypes) == 0 || m.LayerTypes[layer] == "sliding_attention")
}
