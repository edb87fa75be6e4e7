package checkpoint

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/must"
)

// The test binary runs itself as a child that saves until it is killed; see crash_test.go.
var (
	childDir   = flag.String("child-dir", "", "save checkpoints into this directory, as a child of a test")
	childPoint = flag.String("child-point", "", "the point of a save to die at")
	childStep  = flag.Int64("child-step", 0, "the step to die at")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if *childDir != "" {
		if err := child(*childDir, *childPoint, *childStep); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(closing{m})
}

// rooted opens a directory and creates it if absent.
func rooted(dir string) *os.Root { return must.Have(files.Make(dir)) }

var fieldNames = []string{FieldParam, "exp_avg", "exp_avg_sq"}

// value returns the test value of one element at a step. All values differ, so a part from the wrong place or step is
// detected. Integers below 2^24 are exact in float32.
func value(step int64, field int, param string, i int64) float32 {
	h := int64(0)
	for _, c := range param {
		h = h*31 + int64(c)
	}
	return float32(((step*7+int64(field))*131071 + h*8191 + i) & (1<<24 - 1))
}

// place assigns offsets in a flat space to the shapes, in random order with random gaps.
func place(r *rand.Rand, shapes map[string][]int) (params []Param, total int64) {
	names := slices.Sorted(maps.Keys(shapes))
	r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	for _, name := range names {
		total += r.Int64N(3)
		p := Param{Name: name, Shape: shapes[name], Offset: total}
		params, total = append(params, p), must.Have(p.span()).Hi
	}
	r.Shuffle(len(params), func(i, j int) { params[i], params[j] = params[j], params[i] })
	return params, total + r.Int64N(3)
}

// cut divides [0, total) among n ranks, unevenly. Some ranks may get nothing.
func cut(r *rand.Rand, total int64, n int) []Range {
	cuts := []int64{0, total}
	for range n - 1 {
		cuts = append(cuts, r.Int64N(total+1))
	}
	slices.Sort(cuts)
	ranges := make([]Range, n)
	for i := range ranges {
		ranges[i] = Range{cuts[i], cuts[i+1]}
	}
	return ranges
}

// fill returns the state of one rank at a step.
func fill(params []Param, own Range, step int64) []Field {
	fields := make([]Field, len(fieldNames))
	for k, name := range fieldNames {
		fields[k] = Field{name, make([]float32, own.Len())}
		for i := range fields[k].Data {
			fields[k].Data[i] = -1 // padding
		}
		for _, p := range params {
			span, _ := p.span()
			part := span.overlap(own)
			for e := part.Lo; e < part.Hi; e++ {
				fields[k].Data[e-own.Lo] = value(step, k, p.Name, e-span.Lo)
			}
		}
	}
	return fields
}

func metaOf(step int64, ranks int) Meta {
	return Meta{
		Step: step, Samples: 2 * step, Tokens: 128 * step,
		World:  World{Size: ranks, Context: ranks, Data: 1, Algorithm: "ring", Layout: "zigzag"},
		Config: "train: {steps: 10}\n", CPRunVersion: "test", Seeds: map[string]int64{"train": 1, "data": 1 << 60},
		Extra: map[string]json.RawMessage{"data": json.RawMessage(`{"shard":3}`)},
	}
}

// A fleet holds the savers of all ranks of a run.
type fleet struct {
	savers []*Saver
	params []Param
	ranges []Range
	best   bool // every snapshot is the best so far
}

func newFleet(params []Param, ranges []Range, o Options) (*fleet, error) {
	f := &fleet{params: params, ranges: ranges}
	for _, g := range world(len(ranges)) {
		s, err := NewSaver(g, o)
		if err != nil {
			return nil, errors.Join(err, f.close())
		}
		f.savers = append(f.savers, s)
	}
	return f, nil
}

// fleetOf returns the savers of n ranks with the parameters of most tests.
func fleetOf(t *testing.T, n int, o Options) *fleet {
	t.Helper()
	params, ranges := small(n)
	return must.Have(newFleet(params, ranges, o))
}

// save saves a checkpoint.
func (f *fleet) save(t *testing.T, step int64) error {
	return f.each(func(rank int, s *Saver) error { return s.Save(t.Context(), f.snapshot(rank, step)) })
}

// mustSave saves checkpoints of these steps.
func (f *fleet) mustSave(t *testing.T, steps ...int64) {
	t.Helper()
	for _, step := range steps {
		must.Do(t, f.save(t, step))
	}
}

// each calls do on every rank at once.
func (f *fleet) each(do func(rank int, s *Saver) error) error {
	errs := make([]error, len(f.savers))
	var wg sync.WaitGroup
	for rank, s := range f.savers {
		wg.Go(func() { errs[rank] = do(rank, s) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (f *fleet) snapshot(rank int, step int64) Snapshot {
	return Snapshot{
		Meta: metaOf(step, len(f.savers)), Params: f.params, Ranges: []Range{f.ranges[rank]},
		Fields: fill(f.params, f.ranges[rank], step), Best: f.best,
	}
}

func (f *fleet) close() error {
	return f.each(func(_ int, s *Saver) error { return s.Close() })
}

// small returns the parameters of most tests and the ranges of n ranks.
func small(n int) ([]Param, []Range) {
	r := rand.New(rand.NewPCG(1, 2))
	params, total := place(r, map[string][]int{"embed": {5, 4}, "norm": {4}, "layers.0.w": {4, 3},
		"layers.1.w": {3, 4}})
	ranges := make([]Range, n)
	for i := range ranges {
		ranges[i] = Range{total * int64(i) / int64(n), total * int64(i+1) / int64(n)}
	}
	return params, ranges
}

// saved returns a directory with checkpoints of these steps, written by two ranks.
func saved(t *testing.T, o Options, steps ...int64) (dir string, params []Param) {
	t.Helper()
	if o.Dir == nil && o.Keep == 0 {
		return copied(t, steps...)
	}
	if o.Dir == nil {
		o.Dir = rooted(filepath.Join(t.TempDir(), "checkpoints"))
	}
	if o.RunID == "" {
		o.RunID = "first"
	}
	f := fleetOf(t, 2, o)
	f.mustSave(t, steps...)
	must.Do(t, f.close())
	return o.Dir.Name(), f.params
}

// templates holds directories for copied, by their steps. closing removes them.
var templates = map[string]string{}

// copied returns a directory as two ranks leave it. It copies one, since saves wait for the disk.
func copied(t *testing.T, steps ...int64) (dir string, params []Param) {
	t.Helper()
	params, _ = small(2)
	dir = filepath.Join(t.TempDir(), "checkpoints")
	key := fmt.Sprint(steps)
	if templates[key] == "" {
		templates[key] = must.Have(os.MkdirTemp("", "checkpoints-"))
		saved(t, Options{Dir: rooted(templates[key])}, steps...)
	}
	must.Do(t, os.CopyFS(dir, os.DirFS(templates[key])))
	return dir, params
}

// checkContent fails unless c holds the elements of its own step.
func checkContent(t *testing.T, c *Checkpoint, params []Param) {
	t.Helper()
	checkState(t, c, params, c.Manifest.Step)
}

// checkState fails unless c holds the elements that fill returns for a step.
func checkState(t *testing.T, c *Checkpoint, params []Param, step int64) {
	t.Helper()
	var total int64
	for _, p := range params {
		span, _ := p.span()
		total = max(total, span.Hi)
	}
	all := Range{0, total}
	want := fill(params, all, step)
	got := make([]Field, len(want))
	for i, f := range want {
		got[i] = Field{f.Name, slices.Repeat([]float32{-1}, len(f.Data))}
	}
	must.Do(t, c.Load(t.Context(), params, all, got...))
	for i := range want {
		if !slices.Equal(got[i].Data, want[i].Data) {
			t.Fatalf("step %d: field %s = %v, want %v", c.Manifest.Step, want[i].Name, got[i].Data, want[i].Data)
		}
	}
}

// latestStep returns the step of the newest complete checkpoint, after a check of its content, and the reasons.
func latestStep(t *testing.T, dir string, params []Param) (int64, []string) {
	t.Helper()
	c, reasons, err := Latest(t.Context(), dir)
	if err != nil {
		t.Fatalf("Latest: %v (passed over: %q)", err, reasons)
	}
	defer c.Close()
	checkContent(t, c, params)
	return c.Manifest.Step, reasons
}

// checkLatest fails unless the newest complete checkpoint is of this step, and is found after this number of reasons.
func checkLatest(t *testing.T, when, dir string, params []Param, want int64, reasons int) {
	t.Helper()
	if step, passed := latestStep(t, dir, params); step != want || len(passed) != reasons {
		t.Errorf("%s: latest step is %d, want %d; passed over %q", when, step, want, passed)
	}
}

// checkSteps fails unless a directory holds latest and the checkpoints of these steps, and nothing else.
func checkSteps(t *testing.T, when, dir string, steps ...int64) {
	t.Helper()
	want := []string{latestName}
	for _, step := range steps {
		want = append(want, dirName(step))
	}
	if got := names(t, dir); !slices.Equal(got, want) {
		t.Errorf("%s: the directory holds %q, want %q", when, got, want)
	}
}

// names lists a directory without the lock and the generation records.
func names(t *testing.T, dir string) []string {
	t.Helper()
	var all []string
	for _, e := range must.Have(os.ReadDir(dir)) {
		if e.Name() != lockName && !generationPattern.MatchString(e.Name()) {
			all = append(all, e.Name())
		}
	}
	return all
}
