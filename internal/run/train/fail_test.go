package train

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// runRanks runs a complete run on ranks in this process, and returns the error of each. change may break a rank's run
// before it begins.
func runRanks(t *testing.T, ranks int, set []string, o Options, change func(rank int, r *run)) []error {
	t.Helper()
	cfg, m := example(t, ranks, "cpu", append([]string{"data.seq_len=64", "data.validation.every=0",
		"model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2"}, set...)...)
	ended := make([]error, ranks)
	compute := backend.DType(cfg)
	err := Locally(ranks, "flash", compute, 20*time.Second, func(r int, dev *Device, world *comm.Group) error {
		o := o
		o.Room, o.ConfigYAML, o.Version = m.Room(), string(cfg.YAML()), "test"
		tr, err := newTrainer(context.Background(), cfg, *dev, world, &o)
		if err != nil {
			world.Abort(err)
			if comm.IsRemote(err) { // another rank, ahead of this one, has ended the run
				ended[r], err = err, nil
			}
			return err
		}
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		job := &run{Trainer: tr, opts: o}
		change(r, job)
		if _, ended[r] = job.run(ctx, cancel); ended[r] == nil {
			return world.Barrier(ctx)
		}
		world.Abort(ended[r])
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return ended
}

// afterStep calls f on a rank after a step.
func (r *run) afterStep(step int64, f func()) {
	r.opts.Report = func(rep Report) {
		if rep.Kind == Advanced && rep.Step == step {
			f()
		}
	}
}

// unreadable fails to read samples.
type unreadable struct{ samples }

func (unreadable) Load(int64, []partition.Span, []int32, []int32, []int) error {
	return errors.New("unreadable sample")
}

// A rank that fails during a background checkpoint first aborts the others. They wait in a transfer with it, and their
// part of the checkpoint waits for that. So waiting for the checkpoint first would be a deadlock.
func TestOwnErrorBesideASave(t *testing.T) {
	const ranks, culprit = 3, 1
	o := Options{RunDir: t.TempDir(), RunID: "a"}
	ended := runRanks(t, ranks, []string{"train.steps=50", "checkpoint.every=1"}, o, func(rank int, r *run) {
		if rank == culprit {
			r.afterStep(3, func() { r.train.loader = unreadable{r.train.loader} })
		}
	})
	for rank, err := range ended {
		if err == nil || errors.Is(err, comm.ErrDeadline) || !strings.Contains(err.Error(), "unreadable sample") {
			t.Errorf("rank %d ended with %v, want the cause of rank %d", rank, err, culprit)
		}
		if own := rank == culprit; comm.IsRemote(err) == own {
			t.Errorf("rank %d: told of as the error of another rank: %t, want %t: %v", rank, comm.IsRemote(err), !own,
				err)
		}
		var peer *comm.PeerError
		if errors.As(err, &peer) && peer.Rank != culprit {
			t.Errorf("rank %d blames rank %d, want %d: %v", rank, peer.Rank, culprit, err)
		}
	}
	if _, _, err := checkpoint.Latest(t.Context(), filepath.Join(o.RunDir, "checkpoints")); err != nil {
		t.Errorf("the checkpoints from before are gone: %v", err)
	}
}

// A fault of a stream beside the compute stream ends all ranks with its cause, and none hangs.
func TestFaultOfAFurtherStreamEndsAllRanks(t *testing.T) {
	const ranks, culprit = 2, 1
	for _, name := range []string{"offload", "reload", "state in", "update", "state out"} {
		set := []string{"train.steps=50", "checkpoint.every=0", "memory.shard=parameters", "memory.offload=both",
			"memory.recompute=full", "model.num_hidden_layers=6"}
		ended := runRanks(t, ranks, set, Options{RunDir: t.TempDir(), RunID: "a"}, func(rank int, r *run) {
			r.afterStep(2, func() {
				for _, s := range r.dev.Copies {
					if h := s.(*tensor.HostStream); rank == culprit && h.Name() == name {
						h.Fail(errors.New("broken stream"))
					}
				}
			})
		})
		for rank, err := range ended {
			if err == nil || errors.Is(err, comm.ErrDeadline) || !strings.Contains(err.Error(), "broken stream") ||
				comm.IsRemote(err) == (rank == culprit) {
				t.Errorf("%s: rank %d ended with %v, want the cause of rank %d", name, rank, err, culprit)
			}
		}
	}
}

// A disk failure of one rank is that rank's error, and all others report it as such.
func TestSaveBlamesTheRankWhoseDiskFails(t *testing.T) {
	const ranks, culprit = 3, 2
	for _, async := range []bool{true, false} {
		dir := t.TempDir()
		ended := runRanks(t, ranks, []string{"train.steps=9", "checkpoint.every=1",
			fmt.Sprintf("checkpoint.async=%t", async)}, Options{RunDir: dir, RunID: "a"}, func(rank int, r *run) {
			blockShard(t, dir, culprit, ranks, 1)
			blockShard(t, dir, culprit, ranks, 2)
			r.opts.Report = func(rep Report) {
				if rep.Kind == Saved {
					t.Errorf("async %t, rank %d: step %d is reported as saved", async, rank, rep.Step)
				}
			}
		})
		for rank, err := range ended {
			var peer *comm.PeerError
			if own := rank == culprit; err == nil || errors.As(err, &peer) == own || peer != nil &&
				peer.Rank != culprit {
				t.Errorf("async %t, rank %d: %v; want the fault of rank %d", async, rank, err, culprit)
			}
		}
	}
}

// blockShard creates a directory at the path of a rank's shard, so that its save fails. The end of the save removes it.
func blockShard(t *testing.T, dir string, rank, ranks, step int) {
	t.Helper()
	name := fmt.Sprintf("step-%08d.tmp-a/shard-%05d-of-%05d.safetensors", step, rank, ranks)
	if err := os.MkdirAll(filepath.Join(dir, "checkpoints", name), 0o755); err != nil {
		t.Error(err)
	}
}

// A noRoom is a full disk.
type noRoom struct{}

func (noRoom) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

// One failed save does not end a run, two in a row do. The last save is tried twice. Earlier checkpoints stay, and
// failed ones leave no files.
func TestFailedSaves(t *testing.T) {
	const ranks = 2
	for _, c := range []struct {
		fail   []int // attempts, from 1
		saved  []int // steps
		failed int   // step of the first failure
		ends   bool
	}{
		{fail: []int{1}, failed: 2, saved: []int{4, 6}},
		{fail: []int{2}, failed: 4, saved: []int{2, 6}},
		{fail: []int{3}, failed: 6, saved: []int{2, 4, 6}},
		{fail: []int{1, 3}, failed: 2, saved: []int{4, 6}},
		{fail: []int{2, 3}, failed: 4, saved: []int{2}, ends: true},
		{fail: []int{3, 4}, failed: 6, saved: []int{2, 4}, ends: true},
	} {
		for _, async := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v async %t", c.fail, async), func(t *testing.T) {
				dir := t.TempDir()
				var mu sync.Mutex
				shards := 0
				checkpoint.Disk = func(w io.Writer) io.Writer {
					mu.Lock()
					defer mu.Unlock()
					shards++
					if shards%ranks == 0 && slices.Contains(c.fail, shards/ranks) {
						return noRoom{}
					}
					return w
				}
				defer func() { checkpoint.Disk = func(w io.Writer) io.Writer { return w } }()
				saved, notices := make([][]int, ranks), ""
				set := []string{"train.steps=6", "checkpoint.every=2", "checkpoint.keep=0",
					fmt.Sprintf("checkpoint.async=%t", async)}
				ended := runRanks(t, ranks, set, Options{RunDir: dir, RunID: "a"}, func(rank int, r *run) {
					r.opts.Report = func(rep Report) {
						switch {
						case rep.Kind == Saved:
							saved[rank] = append(saved[rank], int(rep.Step))
						case rep.Kind == Notice && rank == 0:
							notices += rep.Text + "\n"
						}
					}
				})
				for rank, err := range ended {
					if (err != nil) != c.ends || err != nil && !strings.Contains(err.Error(), "no space left") {
						t.Errorf("rank %d ended with %v", rank, err)
					}
					if !slices.Equal(saved[rank], c.saved) {
						t.Errorf("rank %d reports checkpoints of %v, want %v", rank, saved[rank], c.saved)
					}
				}
				if want := fmt.Sprintf("checkpoint of step %d: ", c.failed); !strings.Contains(notices, want) ||
					!strings.Contains(notices, "no space left") {
					t.Errorf("no notice says %q:\n%s", want, notices)
				}
				want := []string{"latest"}
				for _, step := range c.saved {
					want = append(want, fmt.Sprintf("step-%08d", step))
				}
				left, err := filepath.Glob(filepath.Join(dir, "checkpoints", "[ls]*"))
				for i := range left {
					left[i] = filepath.Base(left[i])
				}
				if err != nil || !slices.Equal(left, want) {
					t.Errorf("the directory holds %q, %v; want %q", left, err, want)
				}
			})
		}
	}
}

// A failed sync of the metrics fails the save on all ranks, like a disk failure.
func TestUnsyncedMetricsFailTheSave(t *testing.T) {
	const ranks = 2
	saved, notices := make([][]int, ranks), ""
	ended := runRanks(t, ranks, []string{"train.steps=6", "checkpoint.every=3"},
		Options{RunDir: t.TempDir(), RunID: "a"}, func(rank int, r *run) {
			r.opts.Report = func(rep Report) {
				if r.out != nil && rep.Kind == Advanced && rep.Step == 1 {
					r.out = &fullOnce{Writer: r.out}
				}
				if rep.Kind == Saved {
					saved[rank] = append(saved[rank], int(rep.Step))
				}
				if rep.Kind == Notice && rank == 0 {
					notices += rep.Text
				}
			}
		})
	if want := "rank 0: checkpoint of step 3: "; !strings.Contains(notices, want) {
		t.Errorf("no notice says %q:\n%s", want, notices)
	}
	for rank, err := range ended {
		if err != nil || !slices.Equal(saved[rank], []int{6}) {
			t.Errorf("rank %d: %v, checkpoints of %v; want 6 alone", rank, err, saved[rank])
		}
	}
}

// A fullOnce fails its first Sync with a full disk.
type fullOnce struct {
	metrics.Writer
	met bool
}

func (f *fullOnce) Sync() error {
	if f.met {
		return f.Writer.Sync()
	}
	f.met = true
	return syscall.ENOSPC
}

// A synced records whether the metrics were synced after the last line.
type synced struct {
	metrics.Writer
	yes *bool
}

func (s synced) Write(m metrics.Step) error { *s.yes = false; return s.Writer.Write(m) }

func (s synced) Sync() error { *s.yes = true; return s.Writer.Sync() }

// The metrics of the steps before a checkpoint are synced before the checkpoint, so that both survive a loss of power.
func TestMetricsAreSyncedBeforeACheckpoint(t *testing.T) {
	yes, wrote := false, 0
	checkpoint.Disk = func(w io.Writer) io.Writer {
		wrote++
		if !yes {
			t.Error("a checkpoint is written while metrics are not on the disk")
		}
		return w
	}
	defer func() { checkpoint.Disk = func(w io.Writer) io.Writer { return w } }()
	ended := runRanks(t, 1, []string{"train.steps=6", "checkpoint.every=2", "checkpoint.async=false"},
		Options{RunDir: t.TempDir(), RunID: "a"}, func(_ int, r *run) {
			r.opts.Report = func(rep Report) {
				if _, ours := r.out.(synced); r.out != nil && !ours {
					r.out = synced{r.out, &yes}
				}
			}
		})
	if ended[0] != nil || wrote != 3 {
		t.Errorf("%v; %d shards were written, want 3", ended[0], wrote)
	}
}

// If the metrics cannot be opened, the run ends on all ranks before the first step, with the error of rank 0.
func TestUnopenedMetricsEndTheRun(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "metrics.jsonl", "in the way"), 0o755); err != nil {
		t.Fatal(err)
	}
	ended := runRanks(t, 2, []string{"train.steps=6"}, Options{RunDir: dir, RunID: "a"}, func(rank int, r *run) {
		r.afterStep(1, func() { t.Errorf("rank %d has done a step", rank) })
	})
	for rank, err := range ended {
		var peer *comm.PeerError
		if own := rank == 0; err == nil || errors.As(err, &peer) == own || peer != nil && peer.Rank != 0 {
			t.Errorf("rank %d: %v; want the fault of rank 0", rank, err)
		}
	}
}

// A run without events sends no notices.
func TestPlainRunsNoticeNothing(t *testing.T) {
	ended := runRanks(t, 1, []string{"train.steps=6"}, Options{RunDir: t.TempDir(), RunID: "a"}, func(_ int, r *run) {
		r.opts.Report = func(rep Report) {
			if rep.Kind == Notice {
				t.Errorf("notice: %s", rep.Text)
			}
		}
	})
	if ended[0] != nil {
		t.Error(ended[0])
	}
}

// A rank whose save failed is the cause, even if it first gets the error from another rank.
func TestOwnFaultsAreNoVictims(t *testing.T) {
	told := fmt.Errorf("metrics of step 13: %w", &comm.PeerError{Rank: 1, Name: "rank 1",
		Cause: errors.New("rank 2: no space left on device")})
	own := errors.New("shard-00002-of-00003.safetensors: no space left on device")
	err := withOwn(told, []error{nil, own, comm.ErrAborted, told})
	if comm.IsRemote(err) || !errors.Is(err, own) || !strings.Contains(err.Error(), "metrics of step 13") {
		t.Errorf("with a fault of its own: %v", err)
	}
	if err := withOwn(told, []error{nil, comm.ErrAborted}); err != told {
		t.Errorf("without one: %v", err)
	}
	mine := errors.New("the loss is not a number")
	if err := withOwn(mine, []error{own}); !errors.Is(err, mine) || !errors.Is(err, own) {
		t.Errorf("two of its own: %v", err)
	}
}
