package train

import (
	"encoding/json"
	"fmt"
	"math"
)

// A scaler is dynamic loss scaling, as PyTorch's GradScaler does it. Gradients of activations
// below 3e-8 become 0 in float16, so the loss is multiplied by a scale before the backward pass,
// and the optimizer divides the gradients of the weights by it. A step with gradients that overflow
// changes nothing, as the device finds by itself, and the scale is halved; after a number of
// good steps in a row it is doubled. Scales are powers of two, which round nothing.
//
// The host hears of an overflow when up to lag further steps are queued. A step always goes by
// the state known lag steps before it, even if a validation, a checkpoint or a request to stop
// has shown the host more: so none of them changes the training.
//
// A nil *scaler scales nothing.
type scaler struct {
	lag int
	// states begins with the one that the last step has gone by; the others follow the
	// steps that are finished since, in order. It is never empty.
	states []scaling
}

// A scaling is the loss scale after some steps.
type scaling struct {
	Scale   float64 `json:"scale"`
	Good    int     `json:"good_steps"` // in a row, since the scale changed
	Skipped int     `json:"skipped_steps"`
}

// The numbers of GradScaler. It knows no bounds; a scale above the upper one serves nothing,
// and one below 1 would make underflow worse.
const (
	firstScale  = 1 << 16
	leastScale  = 1
	mostScale   = 1 << 24
	growthSteps = 2000
)

// newScaler returns the scaler of a device; nil if its gradients do not underflow.
func newScaler(d *Device) *scaler {
	if !d.ScaleLoss {
		return nil
	}
	return &scaler{lag: d.RunAhead, states: []scaling{{Scale: firstScale}}}
}

// begin returns the scaling of the next step, while at most lag before it are unfinished. Its Scale is
// 0 where nothing is scaled.
func (s *scaler) begin(unfinished int) scaling {
	if s == nil {
		return scaling{}
	}
	known := len(s.states) - 1 // steps after the first state
	s.states = s.states[max(0, known+unfinished-s.lag):]
	return s.states[0]
}

// finish takes note of the oldest unfinished step, which ran with that scale. skipped says that
// it changed nothing; lowered is the scale that it has lowered to, 0 if it has not. Of steps that
// overflow with one scale only the first lowers it.
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

// save returns the state for a checkpoint, beginning with the scaling of the next step. No step is unfinished.
func (s *scaler) save() (map[string]json.RawMessage, error) {
	if s == nil {
		return nil, nil
	}
	s.begin(0)
	text, err := json.Marshal(s.states)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", scalerState, err)
	}
	return map[string]json.RawMessage{scalerState: text}, nil
}

// restore goes on from a checkpoint of that step. Without a state in it, as a run in another
// type leaves it, the scale begins anew.
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
			err = fmt.Errorf("scale %v after %d good and %d skipped steps of %d is none that a run reaches", x.Scale,
				x.Good,
				x.Skipped, step)
		}
	}
	if err != nil {
		return fmt.Errorf("%s in the checkpoint's manifest: %w; remove it there, and the scale begins anew",
			scalerState, err)
	}
	s.states = states
	return nil
}
