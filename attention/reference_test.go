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

// The smaller cases in the other arithmetic, which kernels are held against, and with inputs of the other types. With
// -short, a case runs in one of the four ways, its neighbours in the others.
func TestReferenceTypes(t *testing.T) {
	wide := attentiontest.Rig{Kernel: attention.NewReference[float64](nil)}
	plain := attentiontest.Rig{Kernel: attention.NewReference[float32](nil)}
	n := 0
	for _, c := range attentiontest.Cases() {
		small := c.SeqQ*c.SeqK <= 35
		if !small && c.Layout == attentiontest.Dense {
			continue
		}
		n++
		for i, x := range []struct {
			name  string
			rig   attentiontest.Rig
			dtype tensor.DType
		}{{"float32 arithmetic", plain, tensor.F32}, {"bfloat16", wide, tensor.BF16}, {"float16", wide, tensor.F16},
			{"float32", wide, tensor.F32}} {
			if !testing.Short() || (n+i)%4 == 0 {
				t.Run(c.Name+"/"+x.name, func(t *testing.T) { attentiontest.Check(t, x.rig, c, x.dtype) })
			}
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
