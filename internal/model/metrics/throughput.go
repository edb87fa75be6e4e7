package metrics

import (
	"math"
	"time"
)

// PerSecond returns n / seconds, Absent when no time has passed.
func PerSecond(n, seconds float64) Float {
	if !(seconds > 0) {
		return Absent
	}
	return Float(n / seconds)
}

// PerDevice returns a rate of the whole run divided by its devices, Absent without devices.
func PerDevice(total Float, devices int) Float {
	if devices <= 0 {
		return Absent
	}
	return total / Float(devices)
}

// TFLOPs returns the speed of a step that took seconds, in TFLOP/s of each device. flops are the model
// FLOPs of the whole step over all devices.
func TFLOPs(flops, seconds float64, devices int) Float {
	return PerDevice(PerSecond(flops/1e12, seconds), devices)
}

// MFU returns the fraction of the device's peak, both in TFLOP/s; Absent if the peak is not
// known (0), as on CPUs.
func MFU(tflopsPerDevice Float, peakTFLOPs float64) Float {
	if !(peakTFLOPs > 0) {
		return Absent
	}
	return tflopsPerDevice / Float(peakTFLOPs)
}

// etaDecay scales the weight of a step with each later one. About twenty steps count,
// enough to be steady and few enough to follow a change of speed.
const etaDecay = 0.95

// ETA is an exponential moving average of step times. The zero value is ready for use; the
// average is divided by the sum of the weights, so the first steps are not drawn to zero.
type ETA struct{ sum, weight float64 }

// Add takes the seconds of one step. What is not a positive number is left out.
func (e ETA) Add(seconds float64) ETA {
	if !(seconds > 0) || math.IsInf(seconds, 0) {
		return e
	}
	return ETA{sum: e.sum*etaDecay + seconds, weight: e.weight*etaDecay + 1}
}

// StepSeconds returns the smoothed time of a step, Absent before the first.
func (e ETA) StepSeconds() Float { return PerSecond(e.sum, e.weight) }

// Left returns the time that the remaining steps will take, and false before the first step.
func (e ETA) Left(steps int64) (time.Duration, bool) {
	s := e.StepSeconds()
	if !s.Known() {
		return 0, false
	}
	left := float64(s) * float64(max(steps, 0)) * float64(time.Second)
	return time.Duration(min(left, math.MaxInt64/2)), true
}
