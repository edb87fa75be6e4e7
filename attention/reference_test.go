package attention_test

import (
	"testing"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/attention/attentiontest"
	"github.com/cprun/cprun/tensor"
)

func TestReference(t *testing.T) {
	attentiontest.TestKernel(t, func(testing.TB) attentiontest.Rig {
		return attentiontest.Rig{Kernel: attention.NewReference[float64](nil)}
	}, attentiontest.Options{DTypes: []tensor.DType{tensor.F64}})
}

// The smaller cases in the other arithmetic, which kernels are held against, and with inputs
// of the other types.
func TestReferenceTypes(t *testing.T) {
	wide := attentiontest.Rig{Kernel: attention.NewReference[float64](nil)}
	plain := attentiontest.Rig{Kernel: attention.NewReference[float32](nil)}
	for _, c := range attentiontest.Cases() {
		small := c.SeqQ*c.SeqK <= 35
		if !small && c.Layout == attentiontest.Dense {
			continue
		}
		t.Run(c.Name+"/float32 arithmetic", func(t *testing.T) { attentiontest.Check(t, plain, c, tensor.F32) })
		for _, dtype := range []tensor.DType{tensor.BF16, tensor.F16, tensor.F32} {
			t.Run(c.Name+"/"+dtype.String(), func(t *testing.T) { attentiontest.Check(t, wide, c, dtype) })
		}
	}
}

var (
	_ attention.Kernel = (*attention.Reference[float64])(nil)
	_ attention.Kernel = (*attention.Reference[float32])(nil)
)

func TestReferenceFixtures(t *testing.T) {
	attentiontest.TestFixtures(t, func(testing.TB) attentiontest.Rig {
		return attentiontest.Rig{Kernel: attention.NewReference[float64](nil)}
	})
}

func TestWholeFixtures(t *testing.T) {
	for _, f := range attentiontest.Fixtures(t) {
		t.Run(f.Name, func(t *testing.T) {
			acc, grads := attention.Whole[float64](f.Q, f.K, f.V, f.DOut, f.Mask, f.Softmax)
			f.Check(t, acc, grads)
		})
	}
}

func TestReferenceSinks(t *testing.T) {
	attentiontest.TestSinks(t, func(testing.TB) (attentiontest.Rig, attention.Sinks) {
		return attentiontest.Rig{}, attention.NewReference[float64](nil)
	}, tensor.F64, tensor.F32, tensor.F16, tensor.BF16)
}
