package machine

import (
	"errors"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/backends"
)

func TestAssume(t *testing.T) {
	for _, c := range []struct {
		args []string
		want Machine
	}{
		{nil, Machine{}},
		{[]string{"arch=sm90,cudnn=9.1.0"}, Machine{Arch: 90, CUDNN: backends.V(9, 1, 0), Flash: BuiltFlash,
			Assumed: true}},
		{[]string{"cudnn=8.9.7", "arch=80"}, Machine{Arch: 80, CUDNN: backends.V(8, 9, 7), Flash: BuiltFlash,
			Assumed: true}},
		{[]string{"arch=sm_100a,flash=none,cudnn=none"}, Machine{Arch: 100, Assumed: true}},
		{[]string{"arch=sm120,flash=built,gpus=8,memory=80G,link=450G"},
			Machine{Arch: 120, Flash: BuiltFlash, GPUs: 8, Memory: 80 << 30, Link: 450 << 30, Assumed: true}},
		{[]string{"arch=cpu,memory=16G"}, Machine{Memory: 16 << 30, Assumed: true}},
		{[]string{"arch=cpu,cudnn=none,flash=none"}, Machine{Assumed: true}},
		{[]string{"gpus=4"}, Machine{GPUs: 4, Assumed: true}},
		{[]string{"h200,gpus=8,hosts=16,net=50G"},
			Machine{Name: "NVIDIA H200", Arch: 90, Flash: BuiltFlash, GPUs: 8, Hosts: 16, Memory: 139 << 30,
				Link: 450e9, Net: 50 << 30, Assumed: true}},
		{[]string{"memory=120G,gpu=H200,arch=90"}, Machine{Name: "NVIDIA H200", Arch: 90, Flash: BuiltFlash,
			Memory: 120 << 30, Link: 450e9, Assumed: true}},
		{[]string{"arch=cpu,hosts=2,net=1G"}, Machine{Hosts: 2, Net: 1 << 30, Assumed: true}},
		{[]string{"memory=16G"}, Machine{Memory: 16 << 30, Assumed: true}},
		{[]string{"ram=16G"}, Machine{Memory: 16 << 30, Assumed: true}},
		{[]string{"arch=sm90,ram=2T"}, Machine{Arch: 90, Flash: BuiltFlash, RAM: 2 << 40, Assumed: true}},
		{[]string{"arch=sm89,cudnn=9.5"}, Machine{Arch: 89, CUDNN: backends.V(9, 5, 0), Flash: BuiltFlash,
			Assumed: true}},
	} {
		got, err := Assume(c.args)
		if err != nil || got != c.want {
			t.Errorf("%q: %+v, %v; want %+v", c.args, got, err, c.want)
		}
	}
}

func TestAssumeFaults(t *testing.T) {
	for _, c := range []struct {
		arg  string
		want []string
	}{
		{"", []string{"empty", "key=value"}},
		{"arch=sm90,", []string{"empty"}},
		{"arc=sm90", []string{"did you mean arch?"}},
		{"cuddn=9.1.0,arch=sm90", []string{"did you mean cudnn?"}},
		{"colour=red", []string{"the keys are gpu, arch, cudnn, flash, gpus, hosts, memory, link, net"}},
		{"arch", []string{"no value", "sm90"}},
		{"arch=", []string{"no value"}},
		{"arch=sm90,arch=sm80", []string{"given before as arch=sm90"}},
		{"arch=sm90,arch=sm90", []string{"given twice"}},
		{"arch=hopper", []string{"not an architecture", "sm90"}},
		{"arch=9.0", []string{"not an architecture"}},
		{"arch=sm9", []string{"sm9 is no GPU"}},
		{"arch=sm900", []string{"sm900 is no GPU"}},
		{"arch=sm", []string{"not an architecture"}},
		{"arch=90a", []string{"not an architecture"}},
		{"arch=sm90,cudnn=nine", []string{"9.1.0"}},
		{"arch=sm90,cudnn=91.0.0", []string{"no such cuDNN"}},
		{"arch=sm90,flash=yes", []string{"built or none"}},
		{"arch=sm90,gpus=0", []string{"out of range", "number of GPUs"}},
		{"arch=sm90,gpus=8.5", []string{"not an integer"}},
		{"arch=sm90,gpus=1M", []string{"out of range"}},
		{"arch=sm90,memory=80", []string{"out of range", "80G"}},
		{"arch=sm90,memory=80GB", []string{"80G"}},
		{"arch=sm90,link=-1", []string{"negative"}},
		{"cudnn=9.1.0", []string{"arch=sm90"}},
		{"flash=built", []string{"arch=sm90"}},
		{"arch=cpu,cudnn=9.1.0", []string{"arch=cpu has none"}},
		{"arch=cpu,gpus=8", []string{"arch=cpu has none"}},
		{"arch=cpu,memory=1T,ram=1T", []string{"ram=1T", "one memory"}},
		{"gpu=h20", []string{"did you mean h200?"}},
		{"gpu=voodoo", []string{"the cards are a100"}},
		{"gpu=h100,arch=sm80", []string{"it has arch=sm90"}},
		{"gpu=h100,arch=cpu", []string{"it has arch=sm90"}},
		{"hosts=0", []string{"out of range"}},
		{"arch=sm1,gpus=0,flash=2", []string{"sm1 is no GPU", "out of range", "built or none"}},
	} {
		_, err := Assume([]string{c.arg})
		var fault *AssumeError
		if !errors.As(err, &fault) {
			t.Errorf("%q: %v is no AssumeError", c.arg, err)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q: %v does not say %q", c.arg, err, w)
			}
		}
	}
}

// An accepted machine can be written and read back.
func FuzzAssume(f *testing.F) {
	for _, s := range []string{
		"arch=sm90,cudnn=9.1.0", "arch=cpu", "arch=sm_100a,flash=none", "gpus=8,memory=80G,link=450G", "arch=,=,,",
		"arch=sm90,arch=80",
		"cudnn=9.5.0", "gpu=h200,hosts=16,net=50G", "gpu=a100,memory=40G,arch=80", "arch=120,cudnn=none",
		"memory=99999999999G", "arch=sm90\x00", "ärch=1", "link=1_000_000K",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, arg string) {
		m, err := Assume([]string{arg})
		if err != nil {
			var fault *AssumeError
			if !errors.As(err, &fault) || fault.Msg == "" {
				t.Fatalf("%q: %v is no AssumeError", arg, err)
			}
			return
		}
		if !m.Assumed || m.Arch < 0 || m.Arch > 199 || m.GPUs < 0 || m.GPUs > 1<<16 || m.Memory < 0 || m.Link < 0 ||
			m.CUDNN < 0 ||
			m.IsCPU() && (m.CUDNN != 0 || m.Flash != 0) {
			t.Fatalf("%q became %+v", arg, m)
		}
		again, err := Assume([]string{m.Flag()})
		if err != nil || again != m {
			t.Fatalf("%q became %+v, written as %q, which is %+v, %v", arg, m, m.Flag(), again, err)
		}
	})
}

// A host keeps a tenth of its memory or 8 GiB. Assumed hosts have 1 TiB, and a CPU has no memory beside its own.
func TestHostMemory(t *testing.T) {
	for _, c := range []struct {
		m            Machine
		all, reserve int64
	}{
		{Machine{Arch: 90}, 0, 0},
		{Machine{Arch: 90, RAM: 200 << 30}, 200 << 30, 20 << 30},
		{Machine{Arch: 90, RAM: 64 << 30, Assumed: true}, 64 << 30, 8 << 30},
		{Machine{Arch: 90, RAM: 4 << 30}, 4 << 30, 4 << 30},
		{Machine{Arch: 90, Assumed: true}, 1 << 40, (1 << 40) / 10},
		{Machine{Assumed: true, Memory: 1 << 40, RAM: 1 << 40}, 0, 0},
	} {
		if all, reserve := c.m.HostMemory(); all != c.all || reserve != c.reserve {
			t.Errorf("%+v: %d, %d kept free; want %d, %d", c.m, all, reserve, c.all, c.reserve)
		}
	}
}

func TestCardFor(t *testing.T) {
	for arch, want := range map[int]string{80: "a100-40g", 87: "a40", 90: "h100", 101: "b200", 200: "rtx-pro-6000"} {
		if c, ok := CardFor(arch); !ok || c.Key != want {
			t.Errorf("sm%d is taken as %+v", arch, c)
		}
	}
	if c, ok := CardFor(70); ok {
		t.Errorf("sm70 is taken as %+v", c)
	}
}
