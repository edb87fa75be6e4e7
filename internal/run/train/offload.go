package train

import (
	"slices"

	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/tensor"
)

// An offload moves saved activations of layers to host memory after their forward pass, and back before their backward
// pass (as ALST, arXiv:2506.13996, does for inputs). keep and bring are hooks of the model, whose moved layers take
// turns in a ring of slots on the device.
//
// A slot belongs to the compute stream, except during a copy. Each hand-over is an event: a copy waits for the compute
// stream at the call of the hook, and the compute stream follows the end of a copy before it reads or overwrites the
// slot.
type offload struct {
	dev     *Device
	out, in tensor.Stream
	layers  []int         // the moved layers, ascending
	mem     *tensor.Arena // of the host, for one pass
	moved   []moved       // by position in layers
}

// A moved is the content of a layer on its way.
type moved struct {
	dev, host []View       // empty: it stays in its slot
	out, in   tensor.Event // the ends of the copies; in is nil before the copy back begins
}

// newOffload returns the mover for the layers of a plan, with host memory of that many bytes for a pass. It returns nil
// if no layer moves.
func newOffload(dev *Device, plan []model.Retain, bytes int64) (o *offload, err error) {
	o = &offload{dev: dev}
	for i, l := range plan {
		if l.Host {
			o.layers = append(o.layers, i)
		}
	}
	if len(o.layers) == 0 {
		return nil, nil
	}
	o.moved = make([]moved, len(o.layers))
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

// keep begins to copy a layer's activations to the host. The next work may overwrite the slot of the moved layer before
// this one, so the compute stream follows that copy.
func (o *offload) keep(layer int, saved []View) {
	i, _ := slices.BinarySearch(o.layers, layer)
	if i == 0 {
		o.mem.Release(tensor.Mark{}) // the compute stream has followed all copies of the pass before
	} else if len(o.moved[i-1].dev) > 0 {
		o.dev.Store.Follow(o.moved[i-1].out)
	}
	m := &o.moved[i]
	*m = moved{dev: slices.Clone(saved)}
	if len(saved) == 0 {
		return
	}
	o.out.Wait(o.dev.Stream.Record())
	for _, v := range saved {
		host := o.mem.Alloc(v.DType(), v.Len(0), v.Len(1), v.Len(2), v.Len(3))
		o.dev.Store.Copy(o.out, host, v)
		m.host = append(m.host, host)
	}
	m.out = o.out.Record()
}

// bring makes the compute stream follow the copy of a layer's activations back to its slot. It begins the copy of the
// layer that takes the slot of the moved layer above, which is done.
func (o *offload) bring(layer int, _ []View) {
	i, _ := slices.BinarySearch(o.layers, layer)
	if m := &o.moved[i]; len(m.dev) > 0 {
		o.reload(m)
		o.dev.Store.Follow(m.in)
	}
	if below := i + 1 - model.HostSlots; below >= 0 {
		o.reload(&o.moved[below])
	}
}

// reload begins the copy of a layer back to its slot, once a pass.
func (o *offload) reload(m *moved) {
	if len(m.dev) == 0 || m.in != nil {
		return
	}
	o.in.Wait(o.dev.Stream.Record()) // which has followed m.out, since keep of the next layer waits for it
	for j := range m.dev {
		o.dev.Store.Copy(o.in, m.dev[j], m.host[j])
	}
	m.in = o.in.Record()
}
