package train

import (
	"encoding/json"
	"fmt"
	"math"
)

// A scaler implements dynamic loss scaling like PyTorch's GradScaler. Gradients of activations below 3e-8 become 0 in
// float16. So the loss is multiplied by a scale before the backward pass, and the optimizer divides the gradients of
// the weights by it. If gradients overflow, the device skips the update and the scale is halved. After a number of good
// steps in a row it is doubled. Scales are powers of two, which cause no rounding.
//
// When the host learns of an overflow, up to lag more steps are queued. A step always uses the state lag steps before
// it, even if the host already knows more after a validation, a checkpoint or a stop. So none of these changes the
// training.
//
// A nil *scaler does nothing.
type scaler struct {
	lag int
	// states begins with the state used by the last step. The states after the steps finished since follow, in order.
	// It is never empty.
	states []scaling
}

// A scaling is the loss scale after some steps.
type scaling struct {
	Scale   float64 `json:"scale"`
	Good    int     `json:"good_steps"` // in a row, since the scale changed
	Skipped int     `json:"skipped_steps"`
}

// The constants of GradScaler, plus bounds: a larger scale has no use, and one below 1 would make underflow worse.
const (
	firstScale  = 1 << 16
	leastScale  = 1
	mostScale   = 1 << 24
	growthSteps = 2000
)

// newScaler returns the scaler of a device; nil if its gradients cannot underflow.
func newScaler(d *Device) *scaler {
	if !d.ScaleLoss {
		return nil
	}
	return &scaler{lag: d.RunAhead, states: []scaling{{Scale: firstScale}}}
}

// begin returns the scaling of the next step, with at most lag unfinished steps before it. Without scaling, Scale is 0.
func (s *scaler) begin(unfinished int) scaling {
	if s == nil {
		return scaling{}
	}
	known := len(s.states) - 1 // steps after the first state
	s.states = s.states[max(0, known+unfinished-s.lag):]
	return s.states[0]
}

// finish records the result of the oldest unfinished step, which ran with the given scale. skipped reports an overflow.
// lowered is the new scale if this step lowered it, else 0: of several steps that overflow with one scale, only the
// first lowers it.
func (s *scaler) finish(scale, gradNorm float64) (skipped bool, lowered float64) {
	if s == nil {
		return false, 0
	}
	now := s.states[len(s.states)-1]
	skipped = math.IsNaN(gradNorm) || math.IsInf(gradNorm, 0)
	switch {
	case skipped:
		now.Good = 0
		now.Skipped++
		if scale/2 < now.Scale {
			now.Scale = scale / 2
			lowered = now.Scale
		}
	case now.Good+1 == growthSteps:
		now.Good, now.Scale = 0, min(2*now.Scale, mostScale)
	default:
		now.Good++
	}
	s.states = append(s.states, now)
	return skipped, lowered
}

const scalerState = "loss_scaler"

// save returns the states for a checkpoint, from the one of the next step. No step may be unfinished.
func (s *scaler) save() []scaling {
	if s == nil {
		return nil
	}
	s.begin(0)
	return s.states
}

// restore reads the state from a checkpoint of the given step. A run in another type leaves none; the scale then starts
// over.
func (s *scaler) restore(extra map[string]json.RawMessage, step int) error {
	text, ok := extra[scalerState]
	if s == nil || !ok {
		return nil
	}
	var states []scaling
	err := json.Unmarshal(text, &states)
	if err == nil && len(states) == 0 {
		err = fmt.Errorf("it is empty")
	}
	for _, x := range states {
		if frac, _ := math.Frexp(x.Scale); frac != 0.5 || x.Scale < leastScale || x.Scale > mostScale ||
			x.Good < 0 || x.Good >= growthSteps || x.Skipped < 0 || x.Skipped > step {
			err = fmt.Errorf("scale %v after %d good and %d skipped steps of %d is impossible", x.Scale, x.Good,
				x.Skipped, step)
		}
	}
	if err != nil {
		return fmt.Errorf("%s in the checkpoint's manifest: %w; remove it there to reset the scale",
			scalerState, err)
	}
	s.states = states
	return nil
}
