package command

import (
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/internal/run/bench"
)

// A calibration measures the head dims that the backend supports on the machine, and refuses a backend without any.
func TestCalibratedDims(t *testing.T) {
	for _, c := range []struct {
		on, backend string
		dims        []int
	}{
		{"gpu=h200,cudnn=9.19.0", "fused", []int{64, 128, 256}},
		{"gpu=h200", "flash", []int{64, 128, 256, 512}},
		{"gpu=h200,cudnn=9.4.0", "fused", []int{64, 128}},
		{"gpu=a100,cudnn=9.19.0", "fused", []int{64, 128}},
		{"gpu=a40", "flash", []int{64, 128}},
		{"gpu=h200", "fused", nil},
		{"arch=cpu,ram=8G", "flash", []int{32, 128}},
	} {
		m, s := must.Have(machine.Assume(strings.Split(c.on, " "))), bench.CalibrateSpec{}
		s.Default(m.Device())
		s.Backend = c.backend
		if err := supported(&s, m); !slices.Equal(s.Dims, c.dims) || (err == nil) != (c.dims != nil) {
			t.Errorf("%s on %s: head dims %v, %v", c.backend, c.on, s.Dims, err)
		}
	}
}
