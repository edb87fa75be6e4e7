package commtest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/comm/commtest"
	"github.com/cprun/cprun/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestFaulty runs the conformance suite through a wrapper that only delays, and then checks
// each kind of fault.
func TestFaulty(t *testing.T) {
	commtest.TestCommunicator(t, func(_ *testing.T, compute []tensor.Stream, opts comm.Options) []comm.Communicator {
		groups := comm.NewLocal(len(compute), compute, opts)
		cs := make([]comm.Communicator, len(groups))
		for i, g := range groups {
			cs[i] = commtest.Faulty(g, commtest.Rule{Nth: 2 + i, Delay: time.Millisecond})
		}
		return cs
	})
}

func TestFaultyRules(t *testing.T) {
	boom := errors.New("injected")
	groups := comm.NewLocal(2, nil, comm.Options{})
	defer groups[0].Close()
	defer groups[1].Close()
	ctx := context.Background()
	one := commtest.Faulty(groups[0], commtest.Rule{Call: commtest.AllReduce, Nth: 2, Err: boom}, commtest.Rule{Nth: 4, Abort: boom})
	v := tensor.New(tensor.F32, 4)
	p, err := one.AllReduce(v, comm.Sum)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := one.AllReduce(v, comm.Sum); !errors.Is(err, boom) {
		t.Fatalf("second all-reduce: %v, want %v", err, boom)
	}
	q, err := groups[1].AllReduce(tensor.New(tensor.F32, 4), comm.Sum)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Sync(ctx), q.Sync(ctx)); err != nil {
		t.Fatal(err)
	}
	if _, err := one.Broadcast(v, 0); err != nil { // the third call
		t.Fatal(err)
	}
	if err := one.Barrier(ctx); !errors.Is(err, boom) || comm.IsRemote(err) {
		t.Fatalf("the call after the injected abort: %v", err)
	}
	if err := groups[1].Barrier(ctx); !comm.IsRemote(err) {
		t.Fatalf("the other rank: %v", err)
	}
}
