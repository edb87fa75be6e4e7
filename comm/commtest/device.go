package commtest

import (
	"testing"

	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/tensor"
)

// Setup is a kind of communicator and the devices that its views lie on.
type Setup struct {
	// Ranks is the most that there can be; 0 means any number.
	Ranks int
	// Device makes the device of a rank for one test, which closes it after the communicators.
	Device func(t *testing.T, rank int) Device
	// Connect makes a world of one rank a device. A deadline of zero in opts means the default.
	Connect func(t *testing.T, devices []Device, opts comm.Options) []comm.Communicator

	// SizesUnchecked says that ranks which disagree about the size of a message may wait for
	// each other until the deadline.
	SizesUnchecked bool
	// NaNPassedOver says that Max and Min may leave out a NaN.
	NaNPassedOver bool
}

// Device is where views of a rank lie, and its compute stream. One goroutine uses it at a time.
type Device interface {
	// Stream returns the compute stream.
	Stream() tensor.Stream
	// New returns a dense view of zeros.
	New(d tensor.DType, shape ...int) tensor.View
	// Upload queues a copy of a dense host view, which may be changed as soon as it returns.
	Upload(dst, src tensor.View)
	// Download queues a copy to a dense host view; it is there when the stream has been
	// waited for.
	Download(dst, src tensor.View)
	// Fail queues an error of the compute stream.
	Fail(err error)
	// Close gives the device back. Nothing is queued any more.
	Close() error
}

// A host is the host as a device.
type host struct{ s *tensor.HostStream }

func (h *host) Stream() tensor.Stream                        { return h.s }
func (h *host) New(d tensor.DType, shape ...int) tensor.View { return tensor.New(d, shape...) }
func (h *host) Fail(err error)                               { h.s.Do("fail", func() error { return err }) }
func (h *host) Close() error                                 { return h.s.Close() }

func (h *host) Upload(dst, src tensor.View) {
	own := tensor.New(src.DType(), src.Size())
	copy(tensor.Bytes(own), tensor.Bytes(src))
	h.Download(dst, own)
}

func (h *host) Download(dst, src tensor.View) {
	h.s.Do("copy", func() error {
		copy(tensor.Bytes(dst), tensor.Bytes(src))
		return nil
	})
}

// new returns a view of zeros on the rank's device.
func (r *rank) new(d tensor.DType, shape ...int) tensor.View { return r.dev.New(d, shape...) }

// put copies a dense host view to the rank's device.
func (r *rank) put(v tensor.View) tensor.View {
	s := v.Shape()
	w := r.new(v.DType(), s[:]...)
	if v.Size() > 0 {
		r.dev.Upload(w, v)
	}
	return w
}

// get waits for the device and returns a copy of v on the host.
func (r *rank) get(v tensor.View) (tensor.View, error) {
	s := v.Shape()
	h := tensor.New(v.DType(), s[:]...)
	if v.Size() > 0 {
		r.dev.Download(h, v)
	}
	return h, r.dev.Stream().Sync(r.ctx)
}
