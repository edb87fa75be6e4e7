module example.com/library

go 1.26.0

require github.com/cprun/cprun v0.0.0

require golang.org/x/sys v0.49.0 // indirect

replace github.com/cprun/cprun => ../..
