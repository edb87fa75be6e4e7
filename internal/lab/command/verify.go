package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/lab/verify"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/internal/run/train"
)

// VerifyOptions are the flags of `cprun verify`.
type VerifyOptions struct {
	Options
	Set    []string
	JSON   string // file for the report; "": none
	scaled bool   // the config has linears in FP8
}

// A verified is one side of a verification: one rank, or several.
type verified struct {
	ranks  int
	cfg    *config.Config
	choice chosen
	memory plan.Memory
}

// Verify compares two steps of a config on one rank with those on several, and returns the exit status.
func Verify(ctx context.Context, path string, o VerifyOptions) (int, error) {
	one, many, notes, err := o.sides(path)
	if err != nil {
		return 0, err
	}
	if err := checkReport("--json", o.JSON); err != nil {
		return 0, err
	}
	whole := many.cfg.Data.SeqLen
	if one, many, err = o.shorten(path, one, many); err != nil {
		return 0, err
	}
	p := many.cfg.Parallel
	r := &verify.Report{Config: path, Device: o.machine.Device(), Ranks: many.ranks,
		Compute:  many.cfg.Precision.Compute,
		Strategy: fmt.Sprintf("%s, %s, context %d, data %d", p.Algorithm, p.Layout, p.Context, p.Data)}
	dir, err := newScratch("cprun-verify-")
	if err != nil {
		return 0, err
	}
	code, err := o.compare(ctx, path, r, dir, whole, one, many, notes)
	if err != nil && r.OK == nil {
		r.Error = err.Error()
	}
	return code, errors.Join(err, o.present(r), dir.end(launch.ExitDone))
}

// sides returns the configs of both sides.
func (o *VerifyOptions) sides(path string) (one, many verified, notes []string, err error) {
	ranks, note, err := o.ranks(path)
	if err != nil {
		return one, many, nil, err
	}
	if note != "" {
		notes = append(notes, note)
	}
	o.Set = append(slices.Clone(o.Set), "data.validation={every: 0}", "train.early_stop.patience=0",
		"checkpoint.best=false")
	if many, err = o.load(path, ranks); err != nil {
		return one, many, nil, err
	}
	if _, err := train.Check(many.cfg); err != nil {
		return one, many, nil, &InputError{err}
	}
	if err := many.memory.Check(); err != nil {
		return one, many, nil, &InputError{err}
	}
	one, err = o.load(path, 1, simplest(many.cfg)...)
	if err != nil || !one.memory.Fits {
		one, err = o.load(path, 1, alone...)
	}
	return one, many, append(notes, many.choice.notes...), err
}

// simplest returns the keys of one rank by the simplest code: one micro batch, unless that is many times larger, and no
// offload.
func simplest(cfg *config.Config) []string {
	const most = 16
	keys := append(slices.Clone(alone), "memory.offload=off")
	if t := cfg.Train; t.GlobalBatchSize <= most*t.MicroBatchSize {
		keys = append(keys, fmt.Sprintf("train.micro_batch_size=%d", t.GlobalBatchSize))
	}
	return keys
}

// varied returns several ranks with sharded gradients and several micro batches, and the keys that do so. Without keys
// the config has both, or cannot.
func (o *VerifyOptions) varied(path string, many verified) (v verified, keys []string) {
	if s := many.cfg.Memory.Shard; s == "none" || s == "optimizer" {
		keys = append(keys, "memory.shard=gradients")
	}
	if t := many.cfg.Train; t.MicroBatchSize > 1 && t.GlobalBatchSize == t.MicroBatchSize*many.cfg.Parallel.Data {
		keys = append(keys, "train.micro_batch_size=1")
	}
	length := fmt.Sprintf("data.seq_len=%d", many.cfg.Data.SeqLen) // of a prefix
	v, err := o.load(path, many.ranks, append(slices.Clone(keys), length)...)
	if err != nil || !v.memory.Fits {
		return v, nil
	}
	return v, keys
}

// alone holds the keys of one rank.
var alone = []string{"parallel.context=auto", "parallel.data=auto", "parallel.algorithm=auto", "parallel.layout=auto",
	"parallel.ulysses_degree=auto", "parallel.transport=auto"}

// frugal holds the keys of a rank that needs the least memory.
const frugal = "memory={recompute: full, loss_chunk: auto, shard: auto, offload: both}"

// ranks returns the number of ranks of the larger side. On one GPU both sides run on the CPU, with a note.
func (o *VerifyOptions) ranks(path string) (ranks int, note string, err error) {
	if m, err := found(o.Device); err == nil && m.GPUs == 1 && o.Device == "auto" {
		o.Device, note = "cpu", "both sides run on the CPU, since this machine has one GPU"
		o.Set = append(slices.Clone(o.Set), "parallel.transport=auto", "attention.sm_margin=0", "attention.backend=auto")
	}
	if ranks, err = o.spawns(); err != nil {
		return 0, "", err
	}
	if o.NProc != "auto" && ranks < 2 {
		return 0, "", inputf("--nproc %s: one rank is compared with several; want 2 or more", o.NProc)
	}
	if o.NProc == "auto" && ranks < 2 {
		cfg, err := config.Load(path, config.Options{Set: o.Set, Device: o.machine.Device()})
		if err != nil {
			return 0, "", &InputError{err}
		}
		ranks = max(2, cfg.Parallel.Context*max(1, cfg.Parallel.Data), cfg.Parallel.Data)
	}
	return ranks, note, nil
}

func (o *VerifyOptions) load(path string, ranks int, set ...string) (v verified, err error) {
	d, err := o.decider(o.machine)
	if err != nil {
		return v, err
	}
	v.ranks = ranks
	set = slices.Concat(o.Set, set, []string{"checkpoint.async=false"}) // it has no checkpoints
	v.cfg, err = config.Load(path, config.Options{Set: set, Ranks: ranks, Hosts: o.machine.Hosts,
		Device: o.machine.Device(), Decide: d.Decide})
	if err != nil {
		return v, &InputError{err}
	}
	if v.choice, err = choose(v.cfg, o.machine); err != nil {
		return v, err
	}
	if v.cfg.Model.Tuning.FP8() { // E4M3 turns differences of the last bit into those of a code
		o.scaled, v.cfg.Model.Tuning.Linears = true, "bf16"
		if l := v.cfg.Model.Tuning.LoRA; l != nil && l.Base == "fp8" {
			l.Base = "auto" // the same with FP8
		}
	}
	if v.memory, err = plan.Fit(v.cfg, ranks, o.machine, nil); err != nil {
		return v, &InputError{err}
	}
	return v, nil
}

// shorten saves memory on one rank if it lacks memory. If that is not enough, both sides take the longest prefix of the
// samples that fits: whole documents if it holds several.
func (o *VerifyOptions) shorten(path string, one, many verified) (verified, verified, error) {
	if one.memory.Fits {
		return one, many, nil
	}
	less := append(slices.Clone(alone), frugal)
	short, err := o.load(path, 1, less...)
	if err != nil || short.memory.Fits {
		return short, many, err
	}
	docs, err := train.FirstDocuments(many.cfg)
	if err != nil {
		return one, many, &InputError{err}
	}
	lengths := prefixes(docs, many.cfg.Data.SeqLen)
	try := func(i int) (a, b verified, err error) {
		length := fmt.Sprintf("data.seq_len=%d", lengths[i])
		if b, err = o.load(path, many.ranks, length); err == nil {
			a, err = o.load(path, 1, append(slices.Clone(less), length)...)
		}
		if err == nil {
			err = errors.Join(a.memory.Check(), b.memory.Check())
		}
		return a, b, err
	}
	n := sort.Search(len(lengths), func(i int) bool {
		_, _, err := try(i)
		return err != nil
	})
	one, many, err = try(max(0, n-1))
	if err != nil {
		return one, many, inputf("one rank has not even the memory for %d tokens: %w", lengths[0], err)
	}
	return one, many, nil
}

// prefixes returns the lengths to try, ascending: parts of the first document, and the ends of the others.
func prefixes(docs []int, length int) (list []int) {
	if len(docs) == 0 {
		docs = []int{length}
	}
	const parts = 64
	for i := 1; i < parts; i++ {
		if n := docs[0] * i / parts; n > 0 && !slices.Contains(list, n) {
			list = append(list, n)
		}
	}
	end := 0
	for _, n := range docs {
		end += n
		list = append(list, end)
	}
	return slices.DeleteFunc(list, func(n int) bool { return n >= length })
}

// compare runs all sides and compares their results. The last one runs only if the others agree.
func (o *VerifyOptions) compare(ctx context.Context, path string, r *verify.Report, dir *scratch, whole int,
	one, many verified, notes []string) (int, error) {
	n := 0
	side := func(v verified, with string, task job.Train) (*verify.Side, int, error) {
		task.RunDir, task.Whole = filepath.Join(dir.path, fmt.Sprintf("side-%d", n)), whole
		said := append(notes, "verify: two steps on "+readable.Counted(v.ranks, "rank")+with)
		n, notes = n+1, nil
		return o.side(ctx, r, v, said, task)
	}
	a, code, err := side(one, "", job.Train{})
	if err != nil || code != launch.ExitDone {
		return code, err
	}
	defer a.Close()
	b, code, err := side(many, "", job.Train{Leak: true, Routes: a.Dir})
	if err != nil || code != launch.ExitDone {
		return code, err
	}
	if code, err = judged(r, b, verify.Compare(r, many.cfg, whole, a, b)); err != nil || code != launch.ExitDone {
		return code, err
	}
	if v, keys := o.varied(path, many); len(keys) > 0 {
		r.OK = nil // until it is done
		b, code, err = side(v, " with "+strings.Join(keys, " "), job.Train{Routes: a.Dir})
		if err != nil || code != launch.ExitDone {
			return code, err
		}
		code, err = judged(r, b, verify.CompareVaried(r, v.cfg, keys, a, b))
	}
	if err != nil || code != launch.ExitDone || !o.scaled {
		return code, err
	}
	return o.compareLinears(r, one, side)
}

// judged closes a compared side, and removes its files if all agrees.
func judged(r *verify.Report, s *verify.Side, err error) (int, error) {
	if err = errors.Join(err, s.Close()); err != nil || !*r.OK {
		return launch.ExitFailed, err
	}
	return launch.ExitDone, os.RemoveAll(s.Dir)
}

// compareLinears compares linears in FP8 with others, on one rank with a fresh model.
func (o *VerifyOptions) compareLinears(r *verify.Report, one verified,
	side func(verified, string, job.Train) (*verify.Side, int, error)) (int, error) {
	one.cfg = verify.Fresh(one.cfg)
	scaled := *one.cfg
	scaled.Model.Tuning.Linears = "fp8"
	memory, err := plan.Fit(&scaled, 1, o.machine, nil)
	if err = cmp.Or(err, memory.Check()); err != nil || r.Reasons["gradients"] != "" {
		r.Reasons["linears"] = cmp.Or(r.Reasons["gradients"], fmt.Sprint(err))
		return launch.ExitDone, nil
	}
	r.OK = nil // until it is done
	const fresh = " with a few layers of random weights"
	a, code, err := side(one, fresh, job.Train{})
	if err != nil || code != launch.ExitDone {
		return code, err
	}
	defer a.Close()
	b, code, err := side(verified{ranks: 1, cfg: &scaled}, fresh+" in FP8", job.Train{Routes: a.Dir})
	if err != nil || code != launch.ExitDone {
		return code, err
	}
	return judged(r, b, verify.CompareLinears(r, &scaled, a, b))
}

// side runs a side in the directory of a task.
func (o *VerifyOptions) side(ctx context.Context, r *verify.Report, v verified, notes []string, task job.Train) (
	*verify.Side, int, error) {
	root, err := files.Make(task.RunDir)
	if err != nil {
		return nil, launch.ExitFailed, err
	}
	root.Close()
	task.Config, task.Version, task.Machine = string(v.cfg.YAML()), o.Version, o.machine
	var found train.Verified
	res, err := o.report(ctx, job.RoleVerify, v.ranks, notes, task, &found)
	if err != nil || res.ExitCode != launch.ExitDone {
		if res.First != nil {
			r.Error = res.First.Error()
		}
		return nil, max(res.ExitCode, launch.ExitFailed), err
	}
	s, err := verify.Open(task.RunDir, v.ranks, found, v.cfg.Data.SeqLen)
	if err != nil {
		return nil, launch.ExitFailed, err
	}
	return s, launch.ExitDone, nil
}

// present prints the tables, and writes the JSON of --json.
func (o *VerifyOptions) present(r *verify.Report) error {
	if r.OK != nil {
		if err := r.Print(o.Stdout); err != nil {
			return err
		}
	}
	return writeFile("--json", o.JSON, func(w io.Writer) error { return printJSON(w, r) })
}
