package device

import "fmt"

// Options of a Group. The zero value is usable. All ranks give the same.
type Options struct {
	// Transport is what exchanges between devices go over: "copy" for the copy engines, which
	// need all devices on one node and take no processor from kernels; "nccl"; or "auto", the
	// default, for copy engines where they can, within nodes, and NCCL elsewhere. Reductions always go
	// over NCCL; gathers go the way of exchanges, but for those over several nodes, which NCCL does.
	Transport string
	// MaxCTAs is how many processors of a device a collective may take at most, 16 by default.
	// Groups whose calls are in flight at once must find room on the device together.
	MaxCTAs int
}

// The transports of Options.
const (
	TransportAuto = "auto"
	TransportNCCL = "nccl"
	TransportCopy = "copy"

	// TransportBoth is no option. It is what Group.Transport returns of a group over several nodes.
	TransportBoth = "copy and nccl"
)

const defaultCTAs = 16

func (o Options) withDefaults() (Options, error) {
	switch o.Transport {
	case "":
		o.Transport = TransportAuto
	case TransportAuto, TransportNCCL, TransportCopy:
	default:
		return o, fmt.Errorf("transport %q: known are auto, nccl and copy", o.Transport)
	}
	if o.MaxCTAs == 0 {
		o.MaxCTAs = defaultCTAs
	}
	return o, nil
}
