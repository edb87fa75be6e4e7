package tensor

// What streams do beyond the interface, for traces. HostStream does all of it, and so do the
// streams of GPUs.

// Labelled is a Stream that tells the label of what is queued now.
type Labelled interface{ Labelled() string }

// Follow gives what is queued next on s the label of what is queued now on of: a transfer belongs
// to the step, the layer and the hop that asked for it.
func Follow(s, of Stream) {
	if l, ok := of.(Labelled); ok {
		s.Label(l.Labelled())
	}
}

// Tracing reports whether details of work on a stream are worth the work of making them.
func Tracing(s Stream) bool {
	t, ok := s.(interface{ Traced() bool })
	return ok && t.Traced()
}
