package train_test

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/tensor"
)

// A fakeClock is the clock of a device with steps of 10 s, and 1 s of idle time before each.
type fakeClock struct {
	stream *tensor.HostStream
	mu     sync.Mutex
	now    float64   // guarded by mu
	at     []float64 // guarded by mu
}

// Mark records the beginning of a step at even points, and the end at odd ones.
func (c *fakeClock) Mark(i int) {
	c.stream.Do("", func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.now++
		if i%2 == 1 {
			c.now += 9
		}
		c.at[i] = c.now
		return nil
	})
}

func (c *fakeClock) Between(i, j int) (float64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at[j] - c.at[i], nil
}

func (c *fakeClock) Close() error { return nil }

// The time of a step is the device's time between the ends of two steps, independent of the host. It excludes work
// while no step is queued, such as a validation or a checkpoint.
func TestStepsAreTimedByTheDevice(t *testing.T) {
	for _, c := range []struct {
		ahead int
		want  []float64
	}{
		// Step 4 is followed by a checkpoint and 7 is the last; before 1, 2 and 5 nothing is queued.
		{1, []float64{10, 10, 11, 11, 10, 11, 11}},
		{2, []float64{10, 10, 11, 11, 10, 11, 11}},
		{0, []float64{10, 10, 10, 10, 10, 10, 10}},
	} {
		cfg := load(t, tiny, 2, "train.steps=7", "checkpoint.every=4")
		slow := train.Options{Report: func(r train.Report) {
			if r.Kind == train.Advanced && r.Step == 2 {
				time.Sleep(20 * time.Millisecond) // the host comes late, when several steps are done
			}
		}}
		out, err := runOn(t, cfg, 2, slow, func(d *device.Device) {
			d.RunAhead = c.ahead
			d.NewClock = func(points int) (device.Clock, error) {
				return &fakeClock{stream: d.Stream.(*tensor.HostStream), at: make([]float64, points)}, nil
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		var got []float64
		for _, s := range out.steps {
			got = append(got, float64(s.StepSeconds))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%d steps ahead: step_seconds %v, want %v", c.ahead, got, c.want)
		}
	}
}
