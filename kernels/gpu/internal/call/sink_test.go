//go:build cuda

package call

import (
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/tensor"
)

// hostSinks folds sinks with the GPU kernels on a host, as gpu.Ops does on a GPU. It implements attention.Sinks.
type hostSinks struct{ *host }

func (k hostSinks) FoldSink(o, lse, sink View) error {
	if err := attention.CheckFoldSink(o, lse, sink); err != nil {
		return err
	}
	return k.run(FoldSink(o, lse, sink))
}

func (k hostSinks) SinkGrad(dsink, do, o, lse, sink View) error {
	if err := attention.CheckSinkGrad(dsink, do, o, lse, sink); err != nil {
		return err
	}
	return k.run(SinkGrad(dsink, do, o, lse, sink))
}

func (k hostSinks) run(l SinkLaunch, err error) error {
	if err != nil {
		return err
	}
	p := &l.Params
	k.move(&p.O.At, &p.Dout.At, &p.LSE.At, &p.Sink, &p.Dsink)
	return k.start(SinkProgram, l.Kernel, l.Grid, [2]int{l.Threads, 1}, l.Shared, argumentsOf(p))
}

// TestSinksOnHost runs the conformance suite of sinks on the GPU kernels.
func TestSinksOnHost(t *testing.T) {
	h := newHost(t)
	attentiontest.TestSinks(t, func(testing.TB) (attentiontest.Rig, attention.Sinks) {
		return (&hostFlash{h, false, large}).rig(), hostSinks{h}
	}, tensor.F32, tensor.BF16, tensor.F16)
}
