package opstest

import (
	"crypto/sha256"
	"testing"

	"github.com/cprun/cprun/tensor"
)

// Digest returns the hash of the bits that every operation gives on fixed inputs large enough to
// be split. It is the same for every run on a device, and on the CPU for every number of
// goroutines.
func Digest(t *testing.T, dev Device, activations tensor.DType) [sha256.Size]byte {
	t.Helper()
	r := newRig(t, dev, activations)
	const seq, hidden, inner, vocab = 333, 130, 200, 71
	targets := make([]int32, seq)
	for i := range targets {
		targets[i] = int32(i*i%(vocab+1)) - 1
	}
	ids := make([]int32, seq)
	for i := range ids {
		ids[i] = max(0, targets[i])
	}
	at := r.ints(ids, 1, seq, 1, 1)
	random := func(dtype tensor.DType, shape ...int) View { v, _ := r.random(dtype, shape...); return v }
	table, dtable := random(r.act, 1, vocab, 1, hidden), random(r.par, 1, vocab, 1, hidden)
	w, dw := random(r.act, 1, inner, 1, hidden), random(r.par, 1, inner, 1, hidden)
	norm, dnorm := random(r.par, 1, 1, 1, hidden), random(r.par, 1, 1, 1, hidden)
	x, y, dx := random(r.act, 1, seq, 1, hidden), random(r.act, 1, seq, 1, hidden), random(r.act, 1, seq, 1, hidden)
	inv := r.garbage(r.par, 1, seq, 1, 1)
	gate, up, dy := random(r.act, 1, seq, 1, inner), random(r.act, 1, seq, 1, inner), random(r.act, 1, seq, 1, inner)
	cos, sin := random(r.par, 1, seq, 1, 5), random(r.par, 1, seq, 1, 5)
	logits, loss := random(r.act, 1, seq, 1, vocab), random(tensor.F64, 1, 1, 1, 1)

	r.ops.Embed(x, table, at)
	r.ops.AddRMSNorm(y, inv, x, x, dx, norm, 1e-6)
	heads := y.Reshape([4]int{1, seq, 13, 10})
	r.ops.NormRope(heads, View{}, heads, View{}, cos, sin, 0)
	r.ops.Linear(gate, y, w, View{})
	r.ops.SwiGLU(dy, gate, up)
	r.ops.SwiGLUBackward(gate, up, dy, gate, up)
	r.ops.LinearDX(dx, up, w, true)
	r.ops.LinearDW(dw, up, x)
	r.ops.RMSNormBackward(y, dnorm, dx, x, inv, norm, true)
	r.ops.EmbedBackward(dtable, dx, at)
	r.ops.Linear(logits, y, table, View{})
	r.ops.CrossEntropy(loss, logits, r.ints(targets, 1, seq, 1, 1), 0.5, true)

	h := sha256.New()
	for _, v := range []View{x, y, inv, gate, up, dy, dx, dw, dnorm, dtable, logits, loss} {
		host, err := dev.Download(v)
		if err != nil {
			t.Fatalf("stream: %v", err)
		}
		h.Write(tensor.Bytes(host))
	}
	return [sha256.Size]byte(h.Sum(nil))
}
