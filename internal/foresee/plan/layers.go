package plan

// Layers counts the layers of a model by the place of their saved activations between the passes.
type Layers struct {
	Device  int `json:"device"`
	Host    int `json:"host"`
	Nothing int `json:"nothing"` // the backward pass computes their input again, from the layers below
}

// offloading returns the seconds that copies to and from the host add to a step of micro passes. forward and backward
// are the times of a layer.
func (m *Memory) offloading(rate, forward, backward float64, layers, micro int) (t float64) {
	if n := m.Layers.Host; n > 0 {
		one := float64(m.HostActivations) / float64(n) / rate
		t = float64(micro*n) * (exposedCopy(one, forward) + exposedCopy(one, backward))
	}
	if m.HostOptimizer > 0 { // updates run beside the next forward pass, which waits for the first
		all := float64(m.HostOptimizer) / rate
		t += max(exposedCopy(all, float64(layers)*forward), all/float64(layers+2))
	}
	return t
}
