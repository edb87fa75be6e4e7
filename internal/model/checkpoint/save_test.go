package checkpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
)

// TestReshard saves with random ranks, ranges and offsets, and loads with others.
func TestReshard(t *testing.T) {
	for seed := range uint64(24) {
		r := rand.New(rand.NewPCG(seed, 7))
		shapes := map[string][]int{}
		for range 1 + r.IntN(6) {
			shape := make([]int, r.IntN(4))
			for i := range shape {
				shape[i] = r.IntN(6) // also lengths of 0, and scalars
			}
			shapes[string(rune('a'+r.IntN(26)))+".w"] = shape
		}
		params, total := place(r, shapes)
		f := must.Have(newFleet(params, cut(r, total, 1+r.IntN(5)),
			Options{Dir: rooted(t.TempDir()), RunID: "run", Async: seed%2 == 0}))
		if err := f.save(t, 3); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		dir := f.savers[0].o.Dir.Name()
		if err := f.close(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		c, reasons, err := Latest(t.Context(), dir)
		if err != nil || len(reasons) > 0 {
			t.Fatalf("seed %d: Latest: %v, passed over %q", seed, err, reasons)
		}
		var compact bytes.Buffer // the encoder indents Extra
		if err := json.Compact(&compact, c.Manifest.Extra["data"]); err != nil {
			t.Errorf("seed %d: Extra: %v", seed, err)
		}
		c.Manifest.Extra["data"] = compact.Bytes()
		if want := metaOf(3, len(f.ranges)); !reflect.DeepEqual(c.Manifest.Meta, want) {
			t.Errorf("seed %d: Meta = %+v, want %+v", seed, c.Manifest.Meta, want)
		}
		c.Close()
		other, total := place(r, shapes)
		for _, own := range cut(r, total, 1+r.IntN(5)) {
			got, want := fill(nil, own, 0), fill(other, own, 3)
			if err := loadFrom(t, filepath.Join(dir, dirName(3)), other, own, got...); err != nil {
				t.Fatalf("seed %d: Load(%v): %v", seed, own, err)
			}
			for i := range want {
				if !slices.Equal(got[i].Data, want[i].Data) {
					t.Fatalf("seed %d: Load(%v): %s = %v, want %v", seed, own, want[i].Name, got[i].Data, want[i].Data)
				}
			}
		}
	}
}

func TestAsyncSavesOfChangingState(t *testing.T) {
	dir := t.TempDir()
	f := fleetOf(t, 2, Options{Dir: rooted(dir), RunID: "run", Async: true})
	// The next step changes the slices after the end of the save.
	err := f.each(func(rank int, s *Saver) error {
		snap := f.snapshot(rank, 0)
		for step := range int64(4) {
			if err := s.Wait(); err != nil {
				return err
			}
			snap.Meta = metaOf(step, 2)
			for i, now := range fill(f.params, f.ranges[rank], step) {
				copy(snap.Fields[i].Data, now.Data)
			}
			if err := s.Save(t.Context(), snap); err != nil {
				return err
			}
		}
		return s.Wait()
	})
	must.Do(t, errors.Join(err, f.close()))
	for step := range int64(4) {
		c := must.Have(Open(filepath.Join(dir, dirName(step))))
		checkContent(t, c, f.params)
		c.Close()
	}
}

// short fails with err after n bytes, like a full disk.
type short struct {
	w   io.Writer
	n   int
	err error
}

func (s *short) Write(p []byte) (int, error) {
	if len(p) > s.n {
		n, _ := s.w.Write(p[:s.n])
		s.n -= n
		return n, s.err
	}
	s.n -= len(p)
	return s.w.Write(p)
}

// TestDiskFull fills the disk of one rank. Every rank gets the error from this call or the next, the earlier
// checkpoints stay, and no incomplete one does.
func TestDiskFull(t *testing.T) {
	for _, broken := range []int{0, 1} {
		for _, async := range []bool{false, true} {
			dir, params := saved(t, Options{}, 1, 2)
			f := fleetOf(t, 2, Options{Dir: rooted(dir), RunID: "second", Keep: 1, Async: async})
			var full atomic.Bool
			full.Store(true)
			f.savers[broken].wrap = func(w io.Writer) io.Writer {
				if full.Load() {
					return &short{w, 100, syscall.ENOSPC}
				}
				return w
			}
			errs := make([]error, 2)
			f.each(func(rank int, s *Saver) error {
				errs[rank] = s.Save(t.Context(), f.snapshot(rank, 3))
				if async && errs[rank] == nil {
					errs[rank] = s.Save(t.Context(), f.snapshot(rank, 4)) // the error of step 3
				}
				return nil
			})
			for rank, err := range errs {
				if err == nil || !strings.Contains(err.Error(), "step 3") ||
					!strings.Contains(err.Error(), "no space left") {
					t.Errorf("rank %d of a disk that is full for rank %d: %v", rank, broken, err)
				}
			}
			for i, want := range []bool{true, false, true} {
				if i > 0 { // the second failure in a row, and the third
					f.each(func(rank int, s *Saver) error {
						errs[rank] = errors.Join(s.Save(t.Context(), f.snapshot(rank, 3)), s.Wait())
						return nil
					})
				}
				for rank, err := range errs {
					var retry *RetryError
					if errors.As(err, &retry) != want {
						t.Errorf("rank %d, failure %d in a row: %v may be tried again: %t, want %t", rank, i+1, err,
							!want, want)
					}
				}
			}
			var fault *RankError
			if !errors.As(errs[1-broken], &fault) || fault.Rank != broken || errors.As(errs[broken], &fault) &&
				fault.Rank != broken {
				t.Errorf("rank %d does not name rank %d: %v", 1-broken, broken, errs[1-broken])
			}
			if !errors.Is(errs[broken], syscall.ENOSPC) {
				t.Errorf("rank %d: %v is not ENOSPC", broken, errs[broken])
			}
			checkSteps(t, "full", dir, 1, 2)
			checkLatest(t, "full", dir, params, 2, 0)
			full.Store(false) // there is space again
			f.mustSave(t, 5)
			must.Do(t, f.close())
			checkSteps(t, "with space again", dir, 5)
		}
	}
}

func TestSaveRefuses(t *testing.T) {
	overlap, _ := small(2)
	overlap[0].Offset, overlap[1].Offset = 0, 0
	for _, c := range []struct {
		name   string
		change func(rank int, s *Snapshot)
		want   string
	}{
		{"a gap between ranges", func(rank int, s *Snapshot) {
			if rank == 1 {
				s.Ranges[0].Lo += 2
				for i := range s.Fields {
					s.Fields[i].Data = s.Fields[i].Data[2:]
				}
			}
		}, "do not make the whole state"},
		{"ranges that overlap", func(rank int, s *Snapshot) {
			if rank == 1 {
				s.Ranges[0].Lo -= 2
				for i := range s.Fields {
					s.Fields[i].Data = append(s.Fields[i].Data, 0, 0)
				}
			}
		}, "do not make the whole state"},
		{"a parameter in two ranges", func(_ int, s *Snapshot) {
			r := s.Ranges[0]
			s.Ranges = []Range{{r.Lo, r.Lo + 1}, {r.Lo + 1, r.Hi}}
		}, "is cut into 2 ranges"},
		{"ranges out of order", func(_ int, s *Snapshot) {
			r := s.Ranges[0]
			s.Ranges = []Range{{r.Lo + 1, r.Hi}, {r.Lo, r.Lo + 1}}
		}, "overlaps the one before"},
		{"a slice that is too short", func(rank int, s *Snapshot) { s.Fields[1].Data = s.Fields[1].Data[1:] },
			"exp_avg"},
		{"parameters that overlap", func(rank int, s *Snapshot) { s.Params = overlap }, "overlap"},
		{"other steps", func(rank int, s *Snapshot) { s.Meta.Step += int64(rank) }, "rank 1: saves step 2"},
		{"other fields", func(rank int, s *Snapshot) { s.Fields = s.Fields[:3-rank] }, "of layout"},
	} {
		dir := t.TempDir()
		f := fleetOf(t, 2, Options{Dir: rooted(dir), RunID: "run"})
		err := f.each(func(rank int, s *Saver) error {
			snap := f.snapshot(rank, 1)
			c.change(rank, &snap)
			return s.Save(t.Context(), snap)
		})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
		if _, _, err := Latest(t.Context(), dir); !errors.Is(err, ErrNone) {
			t.Errorf("%s: Latest: %v, want ErrNone", c.name, err)
		}
		must.Do(t, f.close())
	}
}

func TestLostRank(t *testing.T) {
	f := fleetOf(t, 2, Options{Dir: rooted(t.TempDir()), RunID: "run", Async: true})
	ctx, cancel := context.WithCancelCause(t.Context())
	lost := errors.New("rank 1 was killed")
	must.Do(t, f.savers[0].Save(ctx, f.snapshot(0, 1)))
	cancel(lost)
	if err := f.savers[0].Wait(); !errors.Is(err, lost) {
		t.Errorf("Wait = %v, want the cause %v", err, lost)
	}
	must.Do(t, f.close())
}

// A directory with the name latest is an error before training, not at the first save.
func TestLatestIsNoFile(t *testing.T) {
	dir, _ := saved(t, Options{}, 1)
	must.Do(t, os.Remove(filepath.Join(dir, latestName)))
	must.Do(t, os.Mkdir(filepath.Join(dir, latestName), 0o755))
	if f, err := Lock(rooted(dir), ""); err == nil || !strings.Contains(err.Error(), latestName) {
		f.Close()
		t.Errorf("Lock = %v, want a fault of latest", err)
	}
}

// A rank with a hanging disk reports its own fault and ends its save.
func TestDiskThatHangs(t *testing.T) {
	for hangs := range 2 {
		f := fleetOf(t, 2, Options{Dir: rooted(t.TempDir()), RunID: "run", Beat: time.Millisecond,
			Limit: 20 * time.Millisecond})
		ctx, cancel := context.WithCancelCause(t.Context())
		hung := make(chan struct{})
		f.savers[hangs].wrap = func(w io.Writer) io.Writer {
			<-hung
			return w
		}
		errs := make([]error, 2)
		f.each(func(rank int, s *Saver) error {
			errs[rank] = errors.Join(s.Save(ctx, f.snapshot(rank, 1)), s.Wait())
			cancel(errs[rank]) // a run also does this, to inform the other ranks
			return nil
		})
		if errs[hangs] == nil || !strings.Contains(errs[hangs].Error(), "not done its part in 20ms") ||
			errs[1-hangs] == nil {
			t.Errorf("a disk of rank %d that hangs ended in %v", hangs, errs)
		}
		must.Do(t, f.close())
		close(hung)
	}
}

func TestRunIDIsNoPath(t *testing.T) {
	if _, err := NewSaver(world(1)[0], Options{Dir: rooted(t.TempDir()), RunID: "a/../b"}); err == nil {
		t.Error("a run id with a path in it was taken")
	}
}

func TestKeep(t *testing.T) {
	for _, c := range []struct {
		name        string
		keep        int
		steps, want []int64
	}{
		{"all", 0, []int64{1, 2, 3}, []int64{1, 2, 3}},
		{"one", 1, []int64{1, 2, 3}, []int64{3}},
		{"two", 2, []int64{1, 2, 3}, []int64{2, 3}},
		{"the same step again", 2, []int64{1, 2, 2}, []int64{1, 2}},
		{"gone back", 2, []int64{100, 200, 50}, []int64{50, 200}},
	} {
		dir, params := saved(t, Options{Keep: c.keep}, c.steps...)
		checkSteps(t, c.name, dir, c.want...)
		checkLatest(t, c.name, dir, params, c.steps[len(c.steps)-1], 0)
	}
}

// TestKeepWhileLoading checks that prune keeps an open checkpoint, and removes it once it is closed.
func TestKeepWhileLoading(t *testing.T) {
	dir, params := saved(t, Options{}, 1, 2)
	c := must.Have(Open(filepath.Join(dir, dirName(1))))
	saved(t, Options{Dir: rooted(dir), RunID: "second", Keep: 1}, 3)
	checkSteps(t, "while step 1 is open", dir, 1, 3)
	checkContent(t, c, params)
	must.Do(t, c.Close())
	saved(t, Options{Dir: rooted(dir), RunID: "third", Keep: 1}, 4)
	checkSteps(t, "afterwards", dir, 4)
}

// TestKeepCountsWhole checks that a damaged checkpoint does not count towards Keep.
func TestKeepCountsWhole(t *testing.T) {
	dir, params := saved(t, Options{}, 1, 2, 3)
	must.Do(t, os.Remove(filepath.Join(dir, dirName(3), manifestName)))
	saved(t, Options{Dir: rooted(dir), RunID: "second", Keep: 2}, 4)
	checkSteps(t, "with a damaged one", dir, 2, 3, 4)
	checkLatest(t, "with a damaged one", dir, params, 4, 0)
}
