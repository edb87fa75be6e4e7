package attention

import "slices"

// Launches records the names of kernels as a Kernel queues them.
type Launches struct{ names []string }

// Launch records a name.
func (l *Launches) Launch(name string) {
	if !slices.Contains(l.names, name) {
		l.names = append(l.names, name)
	}
}

// Launched returns the different names since the last call, in the order of their first launch.
func (l *Launches) Launched() []string {
	names := l.names
	l.names = nil
	return names
}
