package commtest

import (
	"context"
	"sync"
	"time"

	"github.com/cprun/cprun/comm"
)

// Call names a method of the interface in a Rule.
type Call string

// The calls that rules can be about; Any is each of them.
const (
	Any           Call = ""
	Exchange      Call = "exchange"
	AllReduce     Call = "all-reduce"
	AllGather     Call = "all-gather"
	ReduceScatter Call = "reduce-scatter"
	AllToAll      Call = "all-to-all"
	Broadcast     Call = "broadcast"
	Barrier       Call = "barrier"
	Split         Call = "split"
)

// Rule is a fault. It applies once, to the Nth (from 1) of the calls that it is about, of a
// communicator and those split from it.
type Rule struct {
	Call  Call
	Nth   int
	Delay time.Duration // before the call
	Abort error         // the group is aborted with it before the call
	Err   error         // the call is not made and returns it
}

// Faulty injects faults into c, for tests of what uses a Communicator. What is split from it
// counts and fails with it.
func Faulty(c comm.Communicator, rules ...Rule) comm.Communicator {
	return &faulty{c, &script{rules: rules, seen: make([]int, len(rules))}}
}

type script struct {
	rules []Rule
	mu    sync.Mutex
	seen  []int // guarded by mu; calls so far that each rule is about
}

type faulty struct {
	comm.Communicator
	script *script
}

// before applies the rules to a call; an error is returned in its place.
func (f *faulty) before(call Call) error {
	var due []Rule
	f.script.mu.Lock()
	for i, r := range f.script.rules {
		if r.Call != Any && r.Call != call {
			continue
		}
		if f.script.seen[i]++; f.script.seen[i] == r.Nth {
			due = append(due, r)
		}
	}
	f.script.mu.Unlock()
	var err error
	for _, r := range due {
		if r.Delay > 0 {
			time.Sleep(r.Delay)
		}
		if r.Abort != nil {
			f.Communicator.Abort(r.Abort)
		}
		if err == nil {
			err = r.Err
		}
	}
	return err
}

// SetDeadline passes on to communicators that know it. No rule is about it.
func (f *faulty) SetDeadline(d time.Duration) {
	if c, ok := f.Communicator.(comm.DeadlineSetter); ok {
		c.SetDeadline(d)
	}
}

func (f *faulty) Exchange(send, recv []comm.Message) (comm.Pending, error) {
	if err := f.before(Exchange); err != nil {
		return nil, err
	}
	return f.Communicator.Exchange(send, recv)
}

func (f *faulty) AllReduce(v comm.View, op comm.Op) (comm.Pending, error) {
	if err := f.before(AllReduce); err != nil {
		return nil, err
	}
	return f.Communicator.AllReduce(v, op)
}

func (f *faulty) AllGather(dst, src comm.View) (comm.Pending, error) {
	if err := f.before(AllGather); err != nil {
		return nil, err
	}
	return f.Communicator.AllGather(dst, src)
}

func (f *faulty) ReduceScatter(dst, src comm.View, op comm.Op) (comm.Pending, error) {
	if err := f.before(ReduceScatter); err != nil {
		return nil, err
	}
	return f.Communicator.ReduceScatter(dst, src, op)
}

func (f *faulty) AllToAll(dst, src comm.View) (comm.Pending, error) {
	if err := f.before(AllToAll); err != nil {
		return nil, err
	}
	return f.Communicator.AllToAll(dst, src)
}

func (f *faulty) Broadcast(v comm.View, root int) (comm.Pending, error) {
	if err := f.before(Broadcast); err != nil {
		return nil, err
	}
	return f.Communicator.Broadcast(v, root)
}

func (f *faulty) Barrier(ctx context.Context) error {
	if err := f.before(Barrier); err != nil {
		return err
	}
	return f.Communicator.Barrier(ctx)
}

func (f *faulty) Split(ctx context.Context, colour, key int) (comm.Communicator, error) {
	if err := f.before(Split); err != nil {
		return nil, err
	}
	c, err := f.Communicator.Split(ctx, colour, key)
	if err != nil {
		return nil, err
	}
	return &faulty{c, f.script}, nil
}
