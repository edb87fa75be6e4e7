//go:build cuda

package cuda

import (
	"fmt"

	"gorgonia.org/cu"
)

// Info is what the driver tells of a GPU without taking it into use.
type Info struct {
	Ordinal int
	Name    string
	Arch    int // as Device has it
	SMs     int
	Memory  int64 // bytes
	// Peers are the ordinals of the GPUs whose memory it reaches.
	Peers []int
}

// Probe lists the GPUs that this process sees. No context is made, which would take memory
// of each of them.
func Probe() ([]Info, error) {
	n, err := Count()
	if err != nil {
		return nil, err
	}
	devs, infos := make([]cu.Device, n), make([]Info, n)
	for i := range n {
		if devs[i], err = cu.GetDevice(i); err != nil {
			return nil, fmt.Errorf("GPU %d: %w", i, err)
		}
	}
	for i, dev := range devs {
		if infos[i], err = probe(i, dev, devs); err != nil {
			return nil, fmt.Errorf("GPU %d: %w", i, err)
		}
	}
	return infos, nil
}

func probe(ordinal int, dev cu.Device, all []cu.Device) (d Info, err error) {
	d.Ordinal = ordinal
	if d.Name, err = dev.Name(); err != nil {
		return d, err
	}
	if d.Memory, err = dev.TotalMem(); err != nil {
		return d, err
	}
	major, minor := 0, 0
	for _, a := range []struct {
		attribute cu.DeviceAttribute
		value     *int
	}{{cu.MultiprocessorCount, &d.SMs}, {cu.ComputeCapabilityMajor, &major}, {cu.ComputeCapabilityMinor, &minor}} {
		if *a.value, err = dev.Attribute(a.attribute); err != nil {
			return d, fmt.Errorf("attribute %d: %w", a.attribute, err)
		}
	}
	d.Arch = 10*major + minor
	for j, peer := range all {
		if j == ordinal {
			continue
		}
		can, err := dev.CanAccessPeer(peer)
		if err != nil {
			return d, fmt.Errorf("access to GPU %d: %w", j, err)
		}
		if can != 0 {
			d.Peers = append(d.Peers, j)
		}
	}
	return d, nil
}
