//go:build cuda

package plan

import "github.com/cprun/cprun/kernels"

// What is planned is what the kernels take.
var _ [0]struct{} = [libraryBytes - kernels.LinearWorkspace - kernels.OpsWorkspace]struct{}{}
