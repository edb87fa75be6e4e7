package checkpoint

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
)

var (
	nfsTrials = flag.Int("nfs.trials", 40, "runs of TestNetworkFileSystem")
	nfsSeed   = flag.Uint64("nfs.seed", 1, "the seed of the first of them")
)

// attempt is a save that was begun: what a restore may give.
type attempt struct{ generation, step int64 }

// salt is a step for value that no other attempt has.
func (a attempt) salt() int64 { return a.generation*256 + a.step }

// trial is a run with its starts, one after the other or one beside the other, on one file system.
type trial struct {
	*testing.T
	r          *rand.Rand
	s          *server
	params     []Param
	hosts      uint64 // made so far
	generation int64

	sure  attempt   // the newest save that was whole for a rank; zero: none was
	later []attempt // those that were begun after it
}

func (tr *trial) host(rate int) *host {
	tr.hosts++
	h := tr.s.host(tr.r.Uint64())
	h.rate = rate
	return h
}

// newest is the checkpoint that a restore gives on a host, its content checked.
func (tr *trial) newest(h *host) (attempt, error) {
	c, reasons, err := latestIn(tr.Context(), h.folder())
	if err != nil {
		return attempt{}, fmt.Errorf("%w (passed over: %q)", err, reasons)
	}
	defer c.Close()
	a := attempt{c.Manifest.Generation, c.Manifest.Step}
	if h.rate == 0 {
		checkState(tr.T, c, tr.params, a.salt())
	}
	return a, nil
}

// check holds that a restore gives a whole checkpoint: the newest that was committed, or one that was
// begun later.
func (tr *trial) check(when string) attempt {
	tr.Helper()
	for _, rate := range []int{30, 0} {
		a, err := tr.newest(tr.host(rate))
		switch {
		case err != nil && rate > 0: // it says so, and gives nothing
		case errors.Is(err, ErrNone) && tr.sure == attempt{}:
		case err != nil:
			tr.Fatalf("%s: %v; sure of %v", when, err, tr.sure)
		case a != tr.sure && !slices.Contains(tr.later, a):
			tr.Fatalf("%s: a restore gives %v; sure of %v, begun later: %v", when, a, tr.sure, tr.later)
		}
		if rate == 0 {
			return a
		}
	}
	return attempt{}
}

// start is the savers of one start of the run, each rank on a host of its own.
type start struct {
	*fleet
	hosts      []*host
	local      []*server // of each rank; nil: none
	generation int64
}

// begin starts the run on new hosts. A fault may end it, which is nil then.
func (tr *trial) begin(rate int) *start {
	tr.generation++
	ranks := 1 + tr.r.IntN(3)
	params, ranges := small(ranks)
	o := Options{RunID: fmt.Sprintf("run-%d", tr.generation), Start: Start{Generation: tr.generation},
		Keep: tr.r.IntN(4), Async: tr.r.IntN(2) == 0}
	st := &start{fleet: &fleet{params: params, ranges: ranges}, generation: tr.generation}
	o.Warn = func(err error) {
		if rate == 0 && !errors.Is(err, errDead) && !errors.Is(err, ErrSuperseded) {
			tr.Errorf("without a fault: %v", err)
		}
	}
	local := tr.r.IntN(2) == 0
	for _, g := range world(ranks) {
		h := tr.host(rate)
		s := newSaver(g, o, h.folder())
		if local {
			disk := newServer()
			own := disk.host(tr.r.Uint64())
			own.rate = 10 * rate
			d, err := own.folder().Sub("rank")
			if err != nil {
				return nil
			}
			s.local = &localDir{dir: d, parent: own.folder(), name: "rank"}
			st.local = append(st.local, disk)
		}
		st.hosts, st.savers = append(st.hosts, h), append(st.savers, s)
	}
	return st
}

// save is one save of all ranks, and whether it was whole for one of them.
func (st *start) save(ctx context.Context, step int64) (whole bool, err error) {
	var done atomic.Bool
	err = st.each(func(rank int, s *Saver) error {
		snap := st.snapshot(rank, step)
		snap.Fields = fill(st.params, st.ranges[rank], attempt{st.generation, step}.salt())
		err := errors.Join(s.Save(ctx, snap), s.Wait())
		if err == nil {
			done.Store(true)
		}
		return err
	})
	return done.Load(), err
}

// saves has a start save some steps, and notes what is known of them.
func (tr *trial) saves(st *start, steps ...int64) {
	for _, step := range steps {
		a := attempt{st.generation, step}
		tr.later = append(tr.later, a)
		if whole, _ := st.save(tr.Context(), step); whole {
			tr.sure, tr.later = a, nil
		}
	}
}

// steps are some that follow a checkpoint, and maybe some that a run has gone back to.
func (tr *trial) steps(from attempt) (steps []int64) {
	first := max(1, from.step+1-tr.r.Int64N(3))
	for i := range 1 + tr.r.Int64N(3) {
		steps = append(steps, first+i)
	}
	return steps
}

// end closes what a start has open.
func (tr *trial) end(st *start) {
	_ = st.close() // a fault may keep it from removing its local copies
	for rank, disk := range st.local {
		if st.hosts[rank].rate == 0 && len(disk.root.kids) > 0 {
			tr.Errorf("rank %d leaves %v on its own disk", rank, disk.root.kids)
		}
	}
}

// alone is a start that ends, by itself or because a host dies in a call, before the next begins.
func (tr *trial) alone(rate int) {
	from := tr.check("before a start")
	st := tr.begin(rate)
	if st == nil {
		return
	}
	if tr.r.IntN(2) == 0 {
		h := st.hosts[tr.r.IntN(len(st.hosts))]
		h.dies = 1 + tr.r.IntN(120)
	}
	if err := st.savers[0].begin(); err == nil {
		tr.saves(st, tr.steps(from)...)
	}
	tr.end(st)
	if tr.r.IntN(3) == 0 {
		tr.s.powerLoss(tr.r)
	}
}

// beside is a start that is cut off in the middle of a save, and comes back after another has begun:
// it must not replace what that one has written.
func (tr *trial) beside(rate int) {
	from := tr.check("before a start that is cut off")
	old := tr.begin(rate)
	if old == nil {
		return
	}
	if err := old.savers[0].begin(); err != nil {
		tr.end(old)
		return
	}
	h := old.hosts[0]
	if tr.r.IntN(4) == 0 {
		h = old.hosts[len(old.hosts)-1]
	}
	tr.s.mu.Lock()
	h.stops = h.calls + 1 + tr.r.IntN(150)
	tr.s.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		tr.saves(old, tr.steps(from)...)
	}()
	select {
	case <-h.stood:
	case <-ended:
		tr.end(old)
		return
	}
	sure, later := tr.sure, slices.Clone(tr.later) // saves of old stands still, and so does this
	next := tr.begin(rate)
	var known trial
	if next != nil {
		if err := next.savers[0].begin(); err == nil {
			from, _ := tr.newest(tr.host(0))
			known = trial{T: tr.T, r: tr.r, s: tr.s, sure: sure, later: later}
			known.saves(next, tr.steps(from)...)
		}
	}
	close(h.goOn)
	<-ended
	tr.end(old)
	if next != nil {
		if known.sure.generation == next.generation {
			tr.sure, tr.later = known.sure, known.later
		} else {
			tr.later = append(tr.later, known.later...)
		}
		tr.check("after both")
		tr.saves(next, 99) // what the old one did has not harmed it
		tr.end(next)
	}
}

// TestNetworkFileSystem saves and restores on file systems that do what network file systems do, over
// and over: see nfs_test.go. A restore gives a whole checkpoint, never a mix, and none that is older than
// the newest that was committed.
func TestNetworkFileSystem(t *testing.T) {
	for i := range *nfsTrials {
		seed := *nfsSeed + uint64(i)
		ok := t.Run(fmt.Sprint(seed), func(t *testing.T) {
			params, _ := small(1)
			tr := &trial{T: t, r: rand.New(rand.NewPCG(seed, 5)), s: newServer(), params: params}
			for range 6 {
				rate := []int{0, 400, 100, 30}[tr.r.IntN(4)]
				if tr.r.IntN(3) == 0 {
					tr.beside(rate)
				} else {
					tr.alone(rate)
				}
				tr.check("after a start")
			}
			tr.alone(0)
			tr.check("at the end")
		})
		if !ok {
			t.Fatalf("again: go test ./internal/model/checkpoint -run TestNetworkFileSystem -nfs.trials 1 -nfs.seed %d",
				seed)
		}
	}
}
