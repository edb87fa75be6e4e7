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

// An attempt identifies a save that was begun. A restore may return any attempt since the last complete one.
type attempt struct{ generation, step int64 }

// salt returns a step for value that no other attempt has.
func (a attempt) salt() int64 { return a.generation*256 + a.step }

// A trial is a run on one file system, with several starts in turn or at the same time.
type trial struct {
	*testing.T
	r          *rand.Rand
	s          *server
	params     []Param
	hosts      uint64 // number of hosts made
	generation int64

	sure  attempt   // the newest save that was complete on some rank; zero: none
	later []attempt // saves begun after it
}

func (tr *trial) host(rate int) *host {
	tr.hosts++
	h := tr.s.host(tr.r.Uint64())
	h.rate = rate
	return h
}

// newest restores on a host, checks the content, and returns the attempt.
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

// check fails unless a restore returns a complete checkpoint: the newest committed one, or one begun later.
func (tr *trial) check(when string) attempt {
	tr.Helper()
	for _, rate := range []int{30, 0} {
		a, err := tr.newest(tr.host(rate))
		switch {
		case err != nil && rate > 0: // an error, and no checkpoint
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

// A start holds the savers of one start of the run, each rank on its own host.
type start struct {
	*fleet
	hosts      []*host
	generation int64
}

// begin starts the run on new hosts.
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
	for _, g := range world(ranks) {
		h := tr.host(rate)
		st.hosts, st.savers = append(st.hosts, h), append(st.savers, newSaver(g, o, h.folder()))
	}
	return st
}

// save makes one save on all ranks. whole: it was complete on some rank.
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

// saves makes several saves and records the attempts.
func (tr *trial) saves(st *start, steps ...int64) {
	for _, step := range steps {
		a := attempt{st.generation, step}
		tr.later = append(tr.later, a)
		if whole, _ := st.save(tr.Context(), step); whole {
			tr.sure, tr.later = a, nil
		}
	}
}

// steps returns steps that follow a checkpoint. The first ones may repeat, as after a resume from an older checkpoint.
func (tr *trial) steps(from attempt) (steps []int64) {
	first := max(1, from.step+1-tr.r.Int64N(3))
	for i := range 1 + tr.r.Int64N(3) {
		steps = append(steps, first+i)
	}
	return steps
}

// end closes a start.
func (tr *trial) end(st *start) {
	_ = st.close() // a host may be dead
}

// alone runs a start to its end before the next one begins. A host may die during it.
func (tr *trial) alone(rate int) {
	from := tr.check("before a start")
	st := tr.begin(rate)
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

// beside suspends a start in the middle of a save and continues it after another start has begun. It must not replace
// files of the other start.
func (tr *trial) beside(rate int) {
	from := tr.check("before a start that is cut off")
	old := tr.begin(rate)
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
	sure, later := tr.sure, slices.Clone(tr.later) // constant while old is suspended
	next := tr.begin(rate)
	var known trial
	if err := next.savers[0].begin(); err == nil {
		from, _ := tr.newest(tr.host(0))
		known = trial{T: tr.T, r: tr.r, s: tr.s, sure: sure, later: later}
		known.saves(next, tr.steps(from)...)
	}
	close(h.goOn)
	<-ended
	tr.end(old)
	if known.sure.generation == next.generation {
		tr.sure, tr.later = known.sure, known.later
	} else {
		tr.later = append(tr.later, known.later...)
	}
	tr.check("after both")
	tr.saves(next, 99) // the old start must not have harmed it
	tr.end(next)
}

// TestNetworkFileSystem saves and restores on simulated network file systems (nfs_test.go), many times. A restore
// returns a complete checkpoint of one save, and none older than the newest committed one.
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
