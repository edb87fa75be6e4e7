package worker

import (
	"regexp"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/tensor"
)

func TestStartIsOneLine(t *testing.T) {
	s := &start{began: time.Now()}
	gpu := s.time("GPU")
	weights := s.time("weights")
	weights()
	gpu()
	want := regexp.MustCompile(`^first step done in \d+\.\d\d s: GPU ` +
		`\d+\.\d\d, weights \d+\.\d\d \(s; parts may overlap\)$`)
	if got := s.String(); !want.MatchString(got) {
		t.Errorf("%q, want %v", got, want)
	}
}

// The ranks of a CPU know of other hosts, so that they do not gather over the network what they can set.
func TestDeviceHasItsHosts(t *testing.T) {
	p := &process{Worker: &launch.Worker{}, stream: tensor.NewHostStream("compute")}
	defer p.stream.Close()
	dev, _, err := p.device(t.Context(), device.CUDAOptions{Machine: machine.Machine{Hosts: 3}})
	if err != nil || dev.Machine.Hosts != 3 {
		t.Errorf("%d hosts, %v; want 3", dev.Machine.Hosts, err)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}
