package train

import (
	"slices"

	"github.com/cprun/cprun/tensor"
)

// An offload moves saved activations of layers to host memory after their forward pass, and back before their backward
// pass (as ALST, arXiv:2506.13996, does for inputs). keep and bring are the hooks of package model. Moved layers share a
// ring of slots on the device, so the last ones of a pass are still there in the backward pass, and are not copied.
//
// A slot belongs to the compute stream, except during a copy. Each hand-over is an event: a copy waits for the compute
// stream at the call of the hook, and the compute stream follows the end of a copy before it reads or overwrites the
// slot.
type offload struct {
	dev     *Device
	out, in tensor.Stream
	layers  []int         // the moved layers, ascending
	slots   int           // of the ring
	mem     *tensor.Arena // of the host, for one pass
	moved   []moved       // by position in layers
}

type moved struct {
	host    []View
	dev     []View
	out, in tensor.Event // the ends of the copies; in is nil before the copy back begins
}

// newOffload returns the mover of some layers, with host memory of that many bytes for a pass.
func newOffload(dev *Device, layers []int, slots int, bytes int64) (*offload, error) {
	o := &offload{dev: dev, layers: layers, slots: slots, moved: make([]moved, len(layers))}
	var err error
	if o.mem, err = dev.HostArena("activations on the host", bytes); err != nil {
		return nil, err
	}
	if o.out, err = newStream(dev, "offload"); err != nil {
		return nil, err
	}
	o.in, err = newStream(dev, "reload")
	return o, err
}

// newStream creates a stream for copies, which traces show.
func newStream(dev *Device, name string) (tensor.Stream, error) {
	s, err := dev.NewStream(name)
	if err == nil {
		dev.Copies = append(dev.Copies, s)
	}
	return s, err
}

// keep copies a layer's activations to the host. Its caller overwrites the slot of the moved layer before this one
// next, so the compute stream follows that copy.
func (o *offload) keep(layer int, saved []*View) error {
	i, ok := slices.BinarySearch(o.layers, layer)
	if !ok {
		return nil
	}
	if i == 0 {
		o.mem.Release(tensor.Mark{}) // the compute stream has followed all copies of the pass before
	}
	if i > 0 && o.copies(i-1) {
		o.dev.Store.Follow(o.moved[i-1].out)
	}
	if !o.copies(i) {
		return nil
	}
	m := &o.moved[i]
	*m = moved{}
	o.out.Wait(o.dev.Stream.Record())
	for _, v := range saved {
		host := o.mem.Alloc(v.DType(), v.Len(0), v.Len(1), v.Len(2), v.Len(3))
		o.dev.Store.Copy(o.out, host, *v)
		m.host, m.dev = append(m.host, host), append(m.dev, *v)
	}
	m.out = o.out.Record()
	return nil
}

// copies reports whether the moved layer at position i leaves its slot.
func (o *offload) copies(i int) bool { return i+o.slots < len(o.layers) }

// bring makes the compute stream follow the copy of a layer's activations back to its slot, and begins the copy of the
// next layer below: the layer that had its slot is done.
func (o *offload) bring(layer int, _ []*View) error {
	i, ok := slices.BinarySearch(o.layers, layer)
	if !ok {
		return nil
	}
	if o.copies(i) {
		o.reload(i)
		o.dev.Store.Follow(o.moved[i].in)
	}
	if i > 0 && o.copies(i-1) {
		o.reload(i - 1)
	}
	return nil
}

// reload begins the copy back of the moved layer at position i, once a pass.
func (o *offload) reload(i int) {
	m := &o.moved[i]
	if m.in != nil {
		return
	}
	o.in.Wait(m.out)
	o.in.Wait(o.dev.Stream.Record())
	for j := range m.dev {
		o.dev.Store.Copy(o.in, m.dev[j], m.host[j])
	}
	m.in = o.in.Record()
}
