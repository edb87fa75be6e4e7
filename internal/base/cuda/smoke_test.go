//go:build cuda

package cuda

import (
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

func TestOpen(t *testing.T) {
	n := must.Have(Count())
	for i := range n {
		d := must.Have(Open(i))
		t.Logf("%v: sm_%d, %d SMs, %d bytes of shared memory a block", d, d.Arch, d.SMs, d.SharedPerBlock)
		must.Do(t, d.Close())
	}
}
