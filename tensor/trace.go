package tensor

// What streams do beyond the interface, for traces. HostStream does all of it, and so do the
// streams of GPUs.

// LabelOf returns the label of what is queued now on s, "" if s keeps none. A transfer has that of the compute stream:
// it belongs to the step, the layer and the hop that asked for it.
func LabelOf(s Stream) string {
	if l, ok := s.(interface{ Labelled() string }); ok {
		return l.Labelled()
	}
	return ""
}

// Tracing reports whether details of work on a stream are worth the work of making them.
func Tracing(s Stream) bool {
	t, ok := s.(interface{ Traced() bool })
	return ok && t.Traced()
}
