//go:build cuda

package cuda

import "testing"

func TestOpen(t *testing.T) {
	n, err := Count()
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		d, err := Open(i)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%v: sm_%d, %d SMs, %d bytes of shared memory a block", d, d.Arch, d.SMs, d.SharedPerBlock)
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}
